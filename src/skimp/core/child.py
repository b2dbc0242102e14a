"""The environment of a Python child process that runs a module of this skimp, installed or not."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment with this very package first on the child's path, and `more`."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, **more}


def last_words(said: str) -> str:
    """What a child's stderr ends with, in one line: the last line that is not indented and those that belong to it."""
    lines = said.strip().splitlines() or ["it said nothing"]
    first = max((i for i, line in enumerate(lines) if line[:1].strip()), default=0)
    return "; ".join(line.strip() for line in lines[first:])
