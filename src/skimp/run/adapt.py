"""From a recipe's `adapter:` to additions on the model, and what a person is told about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from skimp.adapters.lora import LoRA, Row
from skimp.adapters.spec import Spec
from skimp.core.read import is_simulated
from skimp.core.structure import Structure
from skimp.core.units import format_bytes
from skimp.export.peft import check_base, load_peft, read_spec


def adapt(model: nn.Module, structure: Structure, recipe: Any) -> LoRA | None:
    """Attach what the recipe asks for; None when it trains the model itself.

    Raises:
        TargetError: targets that match nothing or only in part.
    """
    if recipe.adapter is None:
        return None
    lora = LoRA(model, spec_of(recipe, model, structure), structure)
    if recipe.adapter.source is not None and not is_simulated(next(model.parameters())):
        load_peft(Path(recipe.adapter.source).expanduser(), lora)
    return lora


def check_continued(recipe: Any, base: str) -> None:
    """Refuse to continue an adapter on another base than its file names.

    Raises:
        ModelError: the fingerprints differ.
    """
    if recipe.adapter.source is not None:
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        check_base(Path(recipe.adapter.source).expanduser(), base, dtype)


def spec_of(recipe: Any, model: nn.Module, structure: Structure) -> Spec:
    """The adapter in plain values, read from its folder where one is continued."""
    asked = recipe.adapter
    if asked.source is not None:
        folder, full = Path(asked.source).expanduser(), (asked.embeddings, asked.head)
        return read_spec(folder, model, structure, dropout=asked.dropout, seed=recipe.train.seed, full=full)
    own = {"dropout": asked.dropout, "embeddings": asked.embeddings, "head": asked.head, "seed": recipe.train.seed}
    return Spec(asked.r, asked.alpha, asked.scale, asked.targets, init=asked.init, **own)


def table_lines(rows: list[Row], blocks: tuple[str, ...]) -> list[str]:
    """What was matched, one line a kind of module: how many, in which blocks, their shape, numbers and bytes."""
    groups: dict[tuple[str, tuple[int, ...], int, str], list[Row]] = {}
    for row in rows:
        leaf = row.module.rpartition(".")[2]
        groups.setdefault((leaf, row.shape, row.rank, row.target), []).append(row)
    total, size = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
    lines = [f"adapter: {len(rows)} modules, {total:,} trained numbers, {format_bytes(size)}"]
    for (leaf, shape, rank, target), members in groups.items():
        numbers, bytes_ = sum(m.parameters for m in members), sum(m.bytes for m in members)
        how = f"r {rank}" if rank else "in full"
        inside = _blocks([m.module for m in members], blocks)
        because = "" if target == leaf else f" ({target})"
        lines.append(
            f"  {leaf}{because}: {len(members)} of {shape[0]} x {shape[1]}, {how}, {inside}"
            f"{numbers:,} numbers, {format_bytes(bytes_)}"
        )
    return lines


def _blocks(names: list[str], blocks: tuple[str, ...]) -> str:
    """'all blocks, ', 'blocks 0-3 7, ' or nothing for modules outside them."""
    found = sorted({i for i, block in enumerate(blocks) for n in names if n.startswith(block + ".")})
    if not found:
        return ""
    if len(found) == len(blocks):
        return "all blocks, "
    runs: list[list[int]] = []
    for index in found:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "blocks " + " ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + ", "
