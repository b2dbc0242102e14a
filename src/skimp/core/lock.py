"""The lock of a run's folder, as others see it: held by the process that runs there, gone with it however it ends."""

from __future__ import annotations

import os
from pathlib import Path

#: The file that is locked. It stays behind: only the lock on it says that somebody runs.
LOCK = ".lock"


def running(folder: Path) -> bool:
    """Whether a process runs in `folder` at this moment; False where no run ever was."""
    import fcntl  # where it is missing no run begins

    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
