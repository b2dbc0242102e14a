"""The console every verb prints to: as wide as the terminal, or wide enough for a table."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: Columns of a file or pipe, where nothing says how wide the reader's window is.
PIPE = 120


def console(width: int | None = None) -> Console:
    """A console on standard output; COLUMNS, if set, decides its width."""
    if width is None and "COLUMNS" not in os.environ and not sys.stdout.isatty():
        width = PIPE
    return Console(width=width, highlight=False)
