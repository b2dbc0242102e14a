"""Checkpoints that are complete or absent.

A checkpoint is a folder `step-00000020` holding one safetensors file per group of tensors (model, optimizer,
…), `state.json` with everything that is not a tensor, and the mark `COMPLETE` with the size and checksums of
each file. The folder is written under another name, flushed, renamed, and marked last. A death at any
instant therefore leaves either a complete checkpoint or one that is seen to be incomplete; older ones are
removed only after the new one is complete. The disk must have room for `keep` + 1 checkpoints.

Tensors are written as they are stored, by cleaned parameter name (no `_orig_mod.` and the like), tied ones
once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from skimp.core.errors import CheckpointError
from skimp.core.units import format_bytes
from skimp.run import safetensors_stream
from skimp.run.checkpoint_folder import (
    MARK,
    SCHEMA_VERSION,
    STATE,
    best_checkpoint,
    complete_steps,
    is_best,
    latest,
    mark_best,
    prune,
    recover,
    remove,
    step_name,
)
from skimp.run.checkpoint_read import Checkpoint, load
from skimp.run.durable import fsync_folder, json_bytes, write_file, write_json
from skimp.run.faults import reach
from skimp.run.names import clean_name, storage_key
from skimp.run.tensor_bytes import Later, spec_of

log = logging.getLogger(__name__)

__all__ = ["Checkpoint", "Later", "best_checkpoint", "clean_name", "latest", "load", "mark_best", "save"]

Groups = Mapping[str, Iterable[tuple[str, "Tensor | Later"]]]


def save(root: Path, step: int, groups: Groups, meta: Mapping[str, Any], *, keep: int, best: bool = False) -> Path:
    """Write `root/step-NNNNNNNN` completely, or leave everything as it was.

    Args:
        root: the folder of the run's checkpoints; made when missing.
        step: optimizer steps done; saving a step again replaces it, and the old one stays until the new is
            complete.
        groups: tensors by group and name. Any dtype (packed and quantised ones as they are), strides and
            device; `Later(spec, make)` for one that must be fetched. The iterables are walked once, before
            any byte moves.
        meta: everything else: str keys and plain values (None, bool, int, float, str, lists, dicts).
        keep: how many complete checkpoints stay, this one included; at least 1. The best one stays besides
            them.
        best: mark this one as the best so far. A step that is saved again stays the best.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        CheckpointError: no room (bytes needed and free are said), a failing disk, a tensor without plain
            bytes, two tensors of one name, or something in `meta` that JSON would change.
    """
    root = Path(root)
    if keep < 1 or step < 0:
        raise CheckpointError(f"save(step={step}, keep={keep})", why="step starts at 0 and the newest always stays")
    tensors, aliases = _gather(groups)
    state = _state(step, meta, aliases)
    needed = _bytes_needed(tensors, state)
    aside, final = root / f"{step_name(step)}.tmp-{os.getpid()}", root / step_name(step)
    displaced = root / f"{step_name(step)}.old-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        recover(root)
        _check_room(root, needed)
        files = _write_aside(aside, tensors, state)
        best = best or is_best(final)
        mark = {"schema_version": SCHEMA_VERSION, "step": step, "best": best, "files": files}
        reach("before_rename")
        if final.exists():
            os.replace(final, displaced)
        os.replace(aside, final)
        fsync_folder(root)
        reach("after_rename")
        reach("before_mark")
        write_json(final / MARK, mark, midway=lambda: reach("mid_mark"))
    except BaseException as error:
        _undo(aside, final, displaced)
        if isinstance(error, OSError):
            raise _disk_error(root, step, needed, error) from error
        raise
    reach("after_mark")
    try:
        if displaced.exists():
            remove(displaced)
        prune(root, keep)
    except OSError as error:
        # The new one is complete, so the run is safe and goes on; the disk will fill up, so a person is told.
        log.warning("step %d is saved, but an older checkpoint could not be removed: %s", step, error)
    return final


def _gather(groups: Groups) -> tuple[dict[str, dict[str, Tensor | Later]], dict[str, dict[str, str]]]:
    """Tensors by group and cleaned name, and the names that are the same storage as an earlier one."""
    tensors: dict[str, dict[str, Tensor | Later]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for group, entries in groups.items():
        if not group.replace("_", "").replace("-", "").isalnum():
            raise CheckpointError(
                f"a group named '{group}'", why="it becomes a file name", instead="letters, digits, - and _"
            )
        kept, same, owners = tensors.setdefault(group, {}), aliases.setdefault(group, {}), dict[Any, str]()
        for raw_name, value in entries:
            name = clean_name(raw_name)
            key = None if isinstance(value, Later) else storage_key(value)
            if key is not None and owners.get(key) == name:
                continue  # the same tensor, once with and once without a wrapper's prefix
            if name in kept or name in same:
                raise CheckpointError(
                    f"saving group '{group}'", f"two tensors named '{name}'", "names are the keys on resume"
                )
            spec_of(name, value)
            if key is not None and key in owners:
                same[name] = owners[key]
                continue
            if key is not None:
                owners[key] = name
            kept[name] = value
    return tensors, aliases


def _state(step: int, meta: Mapping[str, Any], aliases: Mapping[str, Mapping[str, str]]) -> bytes:
    _check_plain(meta, "meta")
    return json_bytes({"schema_version": SCHEMA_VERSION, "step": step, "aliases": aliases, "meta": meta})


def _check_plain(value: Any, where: str) -> None:
    """JSON would turn {1: …} into {"1": …}; what comes back must be what was given, tuples as lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"saving {where}",
                    f"a {type(key).__name__} key {key!r}",
                    "JSON keys are strings",
                    "str keys",
                )
            _check_plain(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"saving {where}",
            f"a {type(value).__name__}",
            "state.json holds plain values only",
            "put tensors into a group",
        )


def _bytes_needed(tensors: Mapping[str, Mapping[str, Tensor | Later]], state: bytes) -> int:
    # 4 KiB a file for the rounding up to blocks, and room for the mark: about 120 bytes a tensor.
    total = len(state) + 3 * 4096
    for entries in tensors.values():
        specs = {name: spec_of(name, value) for name, value in entries.items()}
        header, _ = safetensors_stream.layout(specs)
        total += len(header) + sum(spec.nbytes for spec in specs.values()) + 4096 + 120 * len(specs)
    return total


def _check_room(root: Path, needed: int) -> None:
    if shutil.disk_usage(root).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write_aside(aside: Path, tensors: Mapping[str, Mapping[str, Tensor | Later]], state: bytes) -> dict[str, Any]:
    """Fill the folder, flush it, and return size and checksums by file name."""
    reach("before_write")
    aside.mkdir()
    files: dict[str, Any] = {}
    for group, entries in tensors.items():
        path = aside / f"{group}.safetensors"
        sums = safetensors_stream.write(path, entries)
        files[path.name] = {"bytes": path.stat().st_size, "header": sums.pop(""), "tensors": sums}
        reach("after_file")
    write_file(aside / STATE, state)
    files[STATE] = {"bytes": len(state), "crc32": zlib.crc32(state)}
    fsync_folder(aside)
    return files


def _undo(aside: Path, final: Path, displaced: Path) -> None:
    """Back to what was there before. What cannot be removed is unmarked, and cleaned by the next save."""
    with contextlib.suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        if displaced.exists() or not (final / MARK).exists():
            shutil.rmtree(final, ignore_errors=True)
        if displaced.exists():
            os.replace(displaced, final)


def _disk_error(root: Path, step: int, needed: int, error: OSError) -> CheckpointError:
    good, _ = complete_steps(root) if root.is_dir() else ([], [])
    intact = f"the last good checkpoint is intact: {good[-1]}" if good else "there is no earlier checkpoint"
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        free = 0
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    short = needed - free if free < needed else needed
    return CheckpointError(
        f"saving step {step} to {root}: {format_bytes(needed)}",
        f"{error.strerror or error} ({format_bytes(free)} free); {intact}",
        "a checkpoint is written in full before an older one is removed" if full else "the file system refused",
        [
            f"free {format_bytes(short)} there, or name an output on another disk",
            "then continue with --resume",
        ]
        if full
        else "make the folder writable, or name another output; then continue with --resume",
    )
