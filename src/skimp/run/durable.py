"""Small files that are either the old version or the new one, never half of either.

The order is always: write aside, flush to the disk, rename over the old name, flush the folder. Without the
first flush a power cut may leave the new name pointing at no bytes; without the last it may bring the old
name back.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; one `os.write` may take fewer than it is given (at most 2 GiB on Linux)."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, midway: Callable[[], None] | None = None) -> None:
    """Replace `path` by `data`, atomically and durably.

    Args:
        path: the file; its folder must exist.
        data: the whole new content.
        midway: called when half of the bytes are written aside (test facility).

    Raises:
        OSError: no space, no permission; `path` is then untouched and nothing is left beside it.
    """
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            half = len(data) // 2
            write_all(descriptor, data[:half])
            if midway is not None:
                midway()
            write_all(descriptor, data[half:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: Any, midway: Callable[[], None] | None = None) -> None:
    """`write_file` of `value` as indented JSON with a final newline."""
    write_file(path, json_bytes(value), midway)


def json_bytes(value: Any) -> bytes:
    """Indented UTF-8 JSON. Infinity and NaN as Python writes them, so that a best loss of inf comes back."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
