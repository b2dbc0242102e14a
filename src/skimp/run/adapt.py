"""From a recipe's `adapter:` to additions on the model, and what a person is told about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Merging, Row
from skimp.adapters.lora import LoRA
from skimp.adapters.lora import few_blocks as lora_in_few
from skimp.adapters.spec import Spec
from skimp.core.coded_model import Coder
from skimp.core.read import is_simulated
from skimp.core.registry import load
from skimp.core.structure import Structure, read_structure
from skimp.core.units import format_bytes
from skimp.export.peft import check_base, load_peft, read_spec

#: Ranks of one kind of layer up to which each has a line of its own.
FEW_RANKS = 3


def adapt(model: nn.Module, structure: Structure, recipe: Any) -> Handle | None:
    """Attach what the recipe asks for; None when it trains the model itself.

    Raises:
        TargetError: targets that match nothing or only in part.
    """
    asked = recipe.adapter
    if asked is None:
        return None
    if asked.source is None:
        attached: Handle = load(asked.name, "adapter").attach(model, structure, asked.asked(), recipe.train.seed)
        return attached
    lora = LoRA(model, saved_spec(recipe, model, structure), structure)
    if not is_simulated(next(model.parameters())):
        load_peft(Path(asked.source).expanduser(), lora)
    return lora


def coders(recipe: Any, model: nn.Module, structure: Structure, codec: Any) -> Mapping[str, Coder]:
    """Layer -> what makes its codes, where the adapter has a say in them; before any weight is loaded.

    Raises:
        TargetError: as `adapt`.
    """
    asked = recipe.adapter
    if asked is None or asked.source is not None:
        return {}
    found: Mapping[str, Coder] = load(asked.name, "adapter").coders(asked.asked(), model, structure, codec)
    return found


def check_continued(recipe: Any, base: str) -> None:
    """Refuse to continue an adapter on another base than its file names.

    Raises:
        ModelError: the fingerprints differ.
    """
    if recipe.adapter.source is not None:
        dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        check_base(Path(recipe.adapter.source).expanduser(), base, dtype)


def saved_spec(recipe: Any, model: nn.Module, structure: Structure) -> Spec:
    """What the folder of the continued adapter holds, with the training to come."""
    asked = recipe.adapter
    folder, full = Path(asked.source).expanduser(), (asked.embeddings, asked.head)
    return read_spec(folder, model, structure, dropout=asked.dropout, seed=recipe.train.seed, full=full)


def few_blocks(recipe: Any, model: nn.Module, structure: Structure) -> dict[str, Any]:
    """Keys of `adapter:` to change so that every block of a model cut to a few gets what any block gets."""
    asked = recipe.adapter
    if asked.source is not None:
        return {"source": None, **lora_in_few(saved_spec(recipe, model, structure), model, structure, saved=True)}
    keys = {**asked.asked(), "seed": recipe.train.seed}
    changes: dict[str, Any] = load(asked.name, "adapter").few(keys, model, structure)
    return changes


def groups_by_rate(groups: list[dict[str, Any]], adapter: Handle, lr: float) -> list[dict[str, Any]]:
    """Optimizer groups cut so that each has one learning rate: "lr_scale" is its factor; as they are where all have
    one."""
    found: list[dict[str, Any]] = []
    for group in groups:
        factors: dict[float, list[Any]] = {}
        for name, parameter in group["params"]:
            factors.setdefault(adapter.lr_scale(name), []).append((name, parameter))
        if set(factors) == {1.0}:
            found.append(group)
            continue
        found += [{**group, "params": p, "lr": lr * f, "lr_scale": f} for f, p in sorted(factors.items())]
    return found


def merging_of(
    meta: Mapping[str, Any], names: Iterable[str], get: Callable[[str], Tensor], model: nn.Module
) -> Merging | None:
    """A saved adapter as changes of the weights that `model` (without storage) has; None where it adds modules
    instead."""
    method = load(meta.get("name", "lora"), "adapter")
    merges = method.merges or method.merges_into(meta, model, read_structure(model))
    return method.merging(meta, frozenset(names), get) if merges else None


def put_back(model: nn.Module, structure: Structure, meta: Mapping[str, Any], get: Callable[[str], Tensor]) -> Handle:
    """A saved adapter on its loaded base, its tensors filled."""
    handle: Handle = load(meta.get("name", "lora"), "adapter").rebuild(model, structure, meta)
    handle.load(get)
    return handle


def table_lines(rows: list[Row], blocks: tuple[str, ...]) -> list[str]:
    """What was matched, one line a kind of module: how many, in which blocks, their shape, numbers and bytes."""
    groups: dict[tuple[str, tuple[int, ...], str, str], list[Row]] = {}
    alike: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for row in rows:
        alike.setdefault((row.module.rpartition(".")[2], row.shape, row.target), []).append(row.rank)
    for row in rows:
        kind = (row.module.rpartition(".")[2], row.shape, row.target)
        ranks = alike[kind]
        # A few ranks have a line each; slices of as many widths as there are blocks have one for all.
        many = len(set(ranks)) > FEW_RANKS
        how = f"r {min(ranks)} to {max(ranks)}" if many else f"r {row.rank}" if row.rank else "in full"
        groups.setdefault((*kind[:2], how, row.target), []).append(row)
    total, size = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
    lines = [f"adapter: {len(rows)} modules, {total:,} trained numbers, {format_bytes(size)}"]
    for (leaf, shape, how, target), members in groups.items():
        numbers, bytes_ = sum(m.parameters for m in members), sum(m.bytes for m in members)
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
