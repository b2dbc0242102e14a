"""An adapter alone, as a folder PEFT loads on its base: only what was trained, whatever the base's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from skimp.adapters.handle import Handle
from skimp.adapters.loftq import Fitted
from skimp.core.errors import ModelError
from skimp.core.registry import load
from skimp.core.structure import read_structure
from skimp.export.card import adapter_card
from skimp.export.peft import CONFIG, TENSORS, write_peft
from skimp.export.target import MARK, aside, check_target, is_our_folder, mark_of
from skimp.run.adapted import AdaptedTensors
from skimp.run.durable import fsync_folder, write_file, write_json
from skimp.run.found import Found
from skimp.run.skeleton import skeleton


def export_adapter(found: Found, target: Path, *, force: bool = False) -> dict[str, Any]:
    """Write the adapter of a run in the format of Hugging Face PEFT; the base is not read.

    Args:
        found: a run that trained an adapter, or one of its checkpoints.
        target: the folder; new, empty, or an earlier export with `force`.

    Returns:
        {"target", "kind", "bytes", "files", "tensors", "dtype"}.

    Raises:
        ModelError: the run trained the model itself.
        CheckpointError: the target is taken, or its disk is full.
    """
    stored = found.stored
    if not isinstance(stored, AdaptedTensors):
        raise ModelError(
            f"--to peft of {found.asked}",
            "no adapter: every weight was trained" if found.recipe is not None else "no adapter",
            instead="--to merged: the whole model",
        )
    check_target(target, force, is_our_folder)
    adapter = attached(found, stored)
    tensors = sum(1 for _ in adapter.named_parameters())
    size = sum(t.nbytes for _, t in adapter.named_state())
    base = str(found.recipe.model.name) if found.recipe is not None else ""
    with aside(target, 2 * size + (8 << 20)) as folder:
        # What was fitted to codes is written for the original weights: no other program has these codes.
        codec = None if isinstance(stored.merging, Fitted) else stored.codec
        write_peft(folder, adapter, base_name=base, base=stored.expected, codec=codec)
        for name in (TENSORS, CONFIG):
            fsync_folder(folder / name)  # a file is synced as a folder is
        write_file(folder / "README.md", adapter_card(found, base, target).encode())
        write_json(folder / MARK, mark_of({"kind": "peft", "from": found.asked, "step": found.step}))
    file = target / TENSORS
    return {
        "target": str(target),
        "kind": "peft",
        "bytes": file.stat().st_size,
        "files": [file.name],
        "tensors": tensors,
        "dtype": "float32",
    }


def attached(found: Found, stored: AdaptedTensors) -> Handle:
    """The adapter with its numbers on a model without storage: writing it needs the base's shapes alone."""
    model = skeleton(found.config, stored.dtype)
    handle: Handle = load(stored.meta.get("name", "lora"), "adapter").rebuild(model, read_structure(model), stored.meta)
    for name, tensor in list(handle.named_state()):
        module, _, part = name.rpartition(".")
        value = stored.get(name)
        home = handle.module(module)
        if part in home._parameters:
            home._parameters[part] = nn.Parameter(value, tensor.requires_grad)
        else:
            home._buffers[part] = value
    return handle
