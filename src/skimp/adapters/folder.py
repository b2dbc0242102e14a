"""Any adapter by itself, in a folder of skimp's own: for methods that no other program has a format for.

adapter.safetensors has the handle's tensors (`named_state`) under the names they have in the model, skimp_adapter.json
what rebuilds the handle (`meta`), and which base it was trained on: its name, fingerprint, dtype and codec.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from skimp.adapters.handle import Handle
from skimp.core.errors import CheckpointError, ModelError
from skimp.core.registry import load
from skimp.core.structure import Structure, read_structure

FACTS, TENSORS = "skimp_adapter.json", "adapter.safetensors"
VERSION = 1


def write_folder(
    folder: Path, meta: Mapping[str, Any], names: Iterable[str], get: Callable[[str], Tensor], base: Mapping[str, Any]
) -> None:
    """Write an adapter.

    Args:
        folder: made when missing; must not hold an adapter yet.
        meta: `Handle.meta()`. names, get: of `Handle.named_state()`; each tensor is read once.
        base: "name" of the base model, and what is known of "fingerprint", "dtype" and "codec" (`Codec.meta`).

    Raises:
        CheckpointError: there is an adapter already.
    """
    folder = Path(folder)
    if (folder / FACTS).exists():
        raise CheckpointError(f"an adapter in {folder}", "one is there", "it would be overwritten", "another folder")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: get(n).detach().cpu().contiguous().clone() for n in names}, folder / TENSORS, {"format": "pt"})
    # What makes the folder an adapter comes last.
    facts = {"version": VERSION, "adapter": dict(meta), "base": dict(base)}
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def save_folder(folder: Path | str, handle: Handle, base: str = "") -> None:
    """Write an adapter that is on its model; `base` is the name of that model, noted.

    Raises:
        CheckpointError: as `write_folder`.
    """
    tensors = dict(handle.named_state())
    write_folder(Path(folder), handle.meta(), tensors, tensors.__getitem__, {"name": base})


def read_facts(folder: Path) -> dict[str, Any]:
    """What the folder says of the "adapter" and of its "base".

    Raises:
        ModelError: no such folder, or one that a later version wrote.
    """
    folder = Path(folder)
    missing = next((name for name in (FACTS, TENSORS) if not (folder / name).is_file()), None)
    if missing is not None:
        raise ModelError(
            f"an adapter in {folder}",
            f"no {missing}",
            "an adapter is a folder with both",
            "skimp export RUN --to adapter",
        )
    try:
        found: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        version, _, _ = found["version"], found["adapter"]["name"], found["base"]["name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"an adapter in {folder}", f"{FACTS}: {error!r}", "it is damaged") from None
    if version != VERSION:
        raise ModelError(f"an adapter in {folder}", f"format {version}", f"this skimp reads {VERSION}", "a newer skimp")
    return found


def attach_folder(folder: Path | str, model: nn.Module, structure: Structure | None = None) -> Handle:
    """Put a saved adapter on its base, in any process: the handle, frozen or not as it was made.

    Args:
        model: the base with its weights in place; in a codec where it was trained so.

    Raises:
        ModelError: as `read_facts`. SkimpError: another base's shapes or layers; what the method itself refuses.
    """
    folder = Path(folder)
    meta = read_facts(folder)["adapter"]
    handle: Handle = load(meta["name"], "adapter").rebuild(model, structure or read_structure(model), meta)
    with safe_open(folder / TENSORS, framework="pt") as file:
        there = set(file.keys())
        absent = [name for name, _ in handle.named_state() if name not in there]
        if absent:
            raise ModelError(f"an adapter in {folder}", f"no tensor for {absent[0]}", "it is another model's adapter")
        handle.load(file.get_tensor)
    return handle
