"""Parameter → rule → rate → decay → state bytes: folded by kind, and no parameter missing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from skimp.core.structure import Structure
from skimp.optim import AdamW8bit, decay_groups
from skimp.run.rule_table import as_plain, table_lines


@pytest.fixture
def rows() -> list[Any]:
    model = nn.Module()
    model.embed = nn.Embedding(128, 64)
    model.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 96), "norm": nn.LayerNorm(64)}) for _ in range(3))
    return AdamW8bit(decay_groups(model.named_parameters(), 0.1), lr=2e-4).table()


def structure() -> Structure:
    blocks = tuple(f"layers.{i}" for i in range(3))
    return Structure("x", "", blocks, "embed", "head", False, 64, 128, 1, 1, 64, 64)


def test_blocks_are_one_line_and_sums_are_those_of_all(rows: list[Any]) -> None:
    lines = table_lines(rows, structure())
    numbers = 128 * 64 + 3 * (64 * 96 + 96 + 2 * 64)
    assert lines[0].startswith(f"optimizer: {len(rows)} parameters, {numbers:,} numbers, ")
    assert len(lines) == 1 + 5
    up = next(line for line in lines if "layers.*.up.weight" in line)
    assert "3 x (96 x 64)  adamw8bit  lr 0.0002  decay 0.1" in up
    norm = next(line for line in lines if "layers.*.norm.weight" in line)
    assert "decay 0  1.54 kB" in norm  # two float32 states of 64 numbers, three times
    assert sum(row.state_bytes for row in rows) == sum(r["state_bytes"] for r in as_plain(rows))


def test_where_blocks_train_in_turn_both_sums_are_said(rows: list[Any]) -> None:
    assert "1.00 kB of states at a time, " in table_lines(rows, structure(), at_once=1000)[0]


def test_the_plain_form_has_every_parameter(rows: list[Any]) -> None:
    found = as_plain(rows)
    assert {r["parameter"] for r in found} == {row.parameter for row in rows}
    assert all(isinstance(r["shape"], list) for r in found)
