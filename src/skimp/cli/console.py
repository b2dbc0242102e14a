"""The console every verb prints to: as wide as the terminal, or wide enough for a table."""

from __future__ import annotations

import os
import sys

from rich.console import Console
from rich.table import Table

#: Columns of a file or pipe, where nothing says how wide the reader's window is.
PIPE = 120


def console(width: int | None = None, stderr: bool = False) -> Console:
    """A console on standard output (or error, where the output is a text of its own); COLUMNS decides its width."""
    out = sys.stderr if stderr else sys.stdout
    if width is None and "COLUMNS" not in os.environ and not out.isatty():
        width = PIPE
    return Console(width=width, highlight=False, stderr=stderr)


def grid(width: int, name: int = 0, mark: bool = True) -> Table:
    """A table of rows: a mark of three columns, a name of `name` columns, and text that wraps within `width`."""
    made = Table(box=None, show_header=False, pad_edge=False)
    for size in ([3] if mark else []) + ([name] if name else []):
        made.add_column(width=size, no_wrap=True)
        width -= size + 2
    made.add_column(max_width=width)
    return made
