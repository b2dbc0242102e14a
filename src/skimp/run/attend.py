"""The recipe's attention put into a built model, or refused before a weight is loaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from skimp.core.attention import target_device
from skimp.core.errors import ConflictError
from skimp.core.structure import Structure
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.sparse_apply import SparseAttention


def pattern_of(recipe: Any, structure: Structure) -> BlockPattern | None:
    """The pattern that a recipe asks for, over the model's key heads; None where the model keeps its own attention.

    Raises:
        SkimpError: sizes that cannot be, or context that no head would see.
        ConflictError: a device whose kernel is not proved.
    """
    if recipe is None or recipe.attention is None:
        return None
    o = recipe.attention.options()
    pattern = BlockPattern(structure.kv_heads, o["block"], o["local"], o["stride"], o["offset"], o["dense_heads"])
    if o["coverage"] == "full":
        pattern.check_coverage()
    if target_device() != "cpu":
        raise ConflictError(
            f"attention={recipe.attention.name} on {target_device().partition(':')[0]}",
            "runs on a CPU",
            "its step is proved there; on a card it would be planned as another step than runs",
            ["device=cpu", "attention=null"],
        )
    return pattern


def attended(model: nn.Module, structure: Structure, recipe: Any) -> SparseAttention | None:
    """Put the recipe's attention into the model; None where it keeps its own."""
    pattern = pattern_of(recipe, structure)
    if pattern is None:
        return None
    every = recipe.attention.options()["dense_every"]
    dense = [i for i in range(len(structure.blocks)) if every and (i + 1) % every == 0]
    return SparseAttention(model, structure, pattern, dense)
