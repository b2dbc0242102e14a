"""Start the child that makes a report. Whatever becomes of it, the run it is about is finished and stays so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from skimp.core.child import child_environment

#: Drawing takes a second or two; a machine that swaps gets its time.
PATIENCE = 120.0


def make(folder: Path) -> list[str]:
    """Make the report of a run in a process of its own.

    Returns:
        Sentences for a person: what was made; or that it was not, why, and the command that makes it again. Never
        raises for what the child does.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "skimp.report", str(folder)],
            capture_output=True,
            check=False,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            env=child_environment(MPLBACKEND="Agg"),
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [_failed(folder, str(error))]
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return [_failed(folder, last[-1].strip() if last else f"its process ended with code {done.returncode}")]
    return done.stdout.decode(errors="replace").splitlines()


def _failed(folder: Path, why: str) -> str:
    return f"the report was not made: {why}; the run is complete; make it again: skimp report {folder}"
