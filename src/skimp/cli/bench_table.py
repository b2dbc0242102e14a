"""The fine-tuning table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def screen_table(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """A rich table of the rows, one line each."""
    from rich.table import Table

    from skimp.bench.tuning_table import HEADER, cells

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in rows:
        table.add_row(*cells(row))
    return table
