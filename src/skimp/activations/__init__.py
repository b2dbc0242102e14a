"""activations: what is kept for backward. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.core.registry import Facts, Paper

FACTS: list[Facts] = [
    Facts(
        name="recompute",
        kind="saved-tensor policy",
        summary="keep a block's input only and run the block again in backward; all blocks or a chosen subset",
        where="skimp.activations.recompute:Recompute",
        attacks=("activations",),
        exact=True,
        saves="all of a block's kept activations but its input, for one more forward of that block",
        paper=Paper("Training Deep Nets with Sublinear Memory Cost", 2016, "1604.06174"),
        recipe="exact: {recompute: all}",
    )
]


def __getattr__(name: str) -> Any:
    if name == "Recompute":
        return import_module("skimp.activations.recompute").Recompute
    raise AttributeError(f"module 'skimp.activations' has no attribute '{name}'")
