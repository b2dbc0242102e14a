"""Which rule updates what: parameter → rule → learning rate → decay → state bytes, folded by kind for people.

Parameters that differ only in the number of their block are one line. The whole table is in the run's folder
(`optimizer.json` from the start on, `summary.json` at the end), so that no parameter falls between groups unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skimp.core.structure import Structure
from skimp.core.units import format_bytes

Kind = tuple[str, tuple[int, ...], str, float, float]


def as_plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of `UpdateRule.table()` as JSON."""
    return [{**asdict(row), "shape": list(row.shape)} for row in rows]


def table_lines(rows: Sequence[Any], structure: Structure, at_once: int | None = None) -> list[str]:
    """One line a kind of parameter, after a line with the sums.

    Args:
        rows: `UpdateRule.table()`.
        structure: says which block a parameter is in.
        at_once: bytes of the states that exist at a time, where blocks train in turn; None: all of them.
    """
    kinds: dict[Kind, list[Any]] = {}
    for row in rows:
        kinds.setdefault(_kind(row, structure), []).append(row)
    numbers, size = sum(_numel(row) for row in rows), sum(row.state_bytes for row in rows)
    if at_once is None:
        states = f"{format_bytes(size)} of states ({size / max(1, numbers):.2f} bytes a number)"
    else:
        states = f"{format_bytes(at_once)} of states at a time, {format_bytes(size)} if all trained at once"
    lines = [f"optimizer: {len(rows)} parameters, {numbers:,} numbers, {states}"]
    width = max((len(name) for name, *_ in kinds), default=0)
    for (name, shape, rule, lr, decay), members in kinds.items():
        bytes_ = format_bytes(sum(row.state_bytes for row in members))
        count = f"{len(members)} x " if len(members) > 1 else ""
        sizes = " x ".join(map(str, shape)) or "1"
        lines.append(f"  {name:{width}}  {count}({sizes})  {rule}  lr {lr:g}  decay {decay:g}  {bytes_}")
    return lines


def _kind(row: Any, structure: Structure) -> Kind:
    index = structure.block_of(row.parameter)
    name = row.parameter
    if index is not None:
        block = structure.blocks[index]
        name = f"{block.rpartition('.')[0]}.*{name[len(block) :]}"
    return name, tuple(row.shape), row.rule, row.lr, row.weight_decay


def _numel(row: Any) -> int:
    count = 1
    for size in row.shape:
        count *= size
    return count
