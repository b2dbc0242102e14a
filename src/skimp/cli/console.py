"""The console every verb prints to: as wide as the terminal, or wide enough for a table."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: Columns of a file or pipe, where nothing says how wide the reader's window is.
PIPE = 120


def console(width: int | None = None, stderr: bool = False) -> Console:
    """A console on standard output (or error, where the output is a text of its own); COLUMNS decides its width."""
    out = sys.stderr if stderr else sys.stdout
    if width is None and "COLUMNS" not in os.environ and not out.isatty():
        width = PIPE
    return Console(width=width, highlight=False, stderr=stderr)
