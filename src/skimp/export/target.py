"""Where an export goes: nothing of anybody else's is replaced, and what is written is whole or not there.

A folder or file is written under another name beside its place, flushed, and renamed. `--force` replaces an earlier
export of skimp's, which is known by what skimp writes into it, and nothing else.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skimp.core.errors import CheckpointError
from skimp.core.units import format_bytes
from skimp.run.durable import fsync_folder

#: In every exported folder: what it was made from. A GGUF has the same under `MARK_KEY`.
MARK = "skimp_export.json"
MARK_KEY = "skimp.export"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(target: Path, force: bool, ours: Callable[[Path], bool]) -> None:
    """Refuse what is in the way, before anything is read.

    Args:
        target: where the export will be.
        force: an earlier export there may be replaced.
        ours: whether what is there is an export of skimp's.

    Raises:
        CheckpointError: something is there.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not ours(target):
        names = sorted(p.name for p in target.iterdir())[:6] if target.is_dir() else []
        raise CheckpointError(
            f"export to {target}",
            f"a folder that is no export of skimp's: {', '.join(names)}"
            if names
            else "a file that is no export of skimp's",
            "skimp overwrites nothing it did not write" + (", with --force either" if force else ""),
            f"another --output, such as {free_name(target)}",
        )
    if not force:
        raise CheckpointError(
            f"export to {target}",
            "an earlier export is there",
            "it would be replaced",
            ["--force replaces it", f"another --output, such as {free_name(target)}"],
        )


def free_name(target: Path) -> Path:
    """A name near `target` that is not taken."""
    stem, suffix = (target.stem, target.suffix) if target.suffix == ".gguf" else (target.name, "")
    return next(p for n in range(2, 10_000) if not (p := target.with_name(f"{stem}-{n}{suffix}")).exists())


def is_our_folder(target: Path) -> bool:
    """Whether a folder carries skimp's mark."""
    mark = target / MARK
    try:
        return mark.is_file() and json.loads(mark.read_text(encoding="utf-8"))["made_by"] == "skimp"
    except (ValueError, KeyError, TypeError):
        return False


def mark_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The content of a mark: who wrote it and from what."""
    return {"made_by": "skimp", "schema_version": 1, **facts}


@contextmanager
def aside(target: Path, needed: int) -> Iterator[Path]:
    """A path beside `target` to write to; it takes the place of `target` when the block ends well, else it is gone.

    Args:
        needed: bytes that will be written.

    Raises:
        CheckpointError: no room, or a failing disk; nothing is left behind and what was there stays.
    """
    work = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    old = target.with_name(f"{target.name}.old-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(target)
        if shutil.disk_usage(target.parent).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield work
        fsync_folder(work)  # a file takes it too: its bytes are on the disk before its name is
        if target.exists():
            os.replace(target, old)
        os.replace(work, target)
        fsync_folder(target.parent)
    except BaseException as error:
        _remove(work)
        if old.exists() and not target.exists():
            os.replace(old, target)
        if isinstance(error, OSError):
            raise _disk_error(target, needed, error) from error
        raise
    _remove(old)


def _clear_dead(target: Path) -> None:
    """Remove what killed exports of this target left beside it; an old one whose successor never came is put back."""
    for path in sorted(target.parent.glob(f"{target.name}.*-*")):
        kind, _, owner = path.name.removeprefix(f"{target.name}.").partition("-")
        if kind not in ("tmp", "old") or not owner.isdecimal() or _alive(int(owner)):
            continue
        if kind == "old" and not target.exists():
            os.replace(path, target)
        else:
            _remove(path)


def _alive(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _disk_error(target: Path, needed: int, error: OSError) -> CheckpointError:
    full = error.errno in FULL
    free = shutil.disk_usage(target.parent).free if target.parent.is_dir() else 0
    return CheckpointError(
        f"export to {target}: {format_bytes(needed)}",
        f"{error.strerror or error} ({format_bytes(free)} free); nothing was left there",
        "" if full else "the file system refused",
        f"free {format_bytes(max(needed - free, 0) or needed)} there, or an --output on another disk"
        if full
        else "an --output that can be written",
    )
