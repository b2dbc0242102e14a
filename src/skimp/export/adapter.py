"""An adapter alone, as a folder that PEFT or skimp loads on its base: what was trained only, whatever the base's size.

PEFT's form exists for low-rank additions and slices; skimp's own for every method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from skimp.adapters.folder import FACTS, write_folder
from skimp.adapters.folder import TENSORS as OWN_TENSORS
from skimp.adapters.handle import Handle
from skimp.adapters.loftq import Fitted
from skimp.core.errors import ModelError
from skimp.core.registry import load
from skimp.core.structure import read_structure
from skimp.export.card import adapter_card, own_card
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
    stored = _adapter_of(found, "peft")
    if stored.method.peft is Handle.peft:
        raise stored.method.no_peft()
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


def export_own(found: Found, target: Path, *, force: bool = False) -> dict[str, Any]:
    """Write the adapter of a run as a folder of skimp's own, whatever its method; the base is not read.

    Args, returns, raises: as `export_adapter`.
    """
    stored = _adapter_of(found, "adapter")
    check_target(target, force, is_our_folder)
    names = stored.names()
    size = sum(stored.get(name).nbytes for name in names)
    precision = found.recipe.precision if found.recipe is not None else "fp32"
    base = {"name": str(found.recipe.model.name) if found.recipe is not None else "", "precision": precision}
    base |= {"fingerprint": stored.expected, "codec": None if stored.kept_in is None else stored.kept_in.meta()}
    with aside(target, 2 * size + (8 << 20)) as folder:
        write_folder(folder, stored.meta, names, stored.get, base)
        for name in (OWN_TENSORS, FACTS):
            fsync_folder(folder / name)
        write_file(folder / "README.md", own_card(found, stored.meta, base["name"], target).encode())
        write_json(folder / MARK, mark_of({"kind": "adapter", "from": found.asked, "step": found.step}))
    return {
        "target": str(target),
        "kind": "adapter",
        "bytes": (target / OWN_TENSORS).stat().st_size,
        "files": [OWN_TENSORS],
        "tensors": len(names),
        "dtype": "float32",
    }


def _adapter_of(found: Found, kind: str) -> AdaptedTensors:
    if isinstance(found.stored, AdaptedTensors):
        return found.stored
    raise ModelError(
        f"--to {kind} of {found.asked}",
        "no adapter: every weight was trained" if found.recipe is not None else "no adapter",
        instead="--to merged: the whole model",
    )


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
