"""core.codecs: storage formats, listed without importing them (no torch here)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skimp.core.registry import Facts, Paper

FACTS: list[Facts] = [
    Facts(
        name="float32",
        kind="codec",
        summary="Store values as float32: the identity, and the yardstick of the other codecs.",
        where="skimp.core.codecs.float32:Float32",
        attacks=(),
        exact=True,
        saves="4 bytes per element",
    ),
    Facts(
        name="bf16",
        kind="codec",
        summary="Store values as bfloat16, rounded to nearest or stochastically with addressed noise.",
        where="skimp.core.codecs.bf16:BF16",
        attacks=("weights", "optimizer", "activations"),
        exact=False,
        saves="2 bytes per element instead of 4",
        paper=Paper("Deep Learning with Limited Numerical Precision", 2015, "1502.02551"),
    ),
    Facts(
        name="dynamic8",
        kind="codec",
        summary="Store values as 8-bit codes in blocks of 256 with one float32 maximum each.",
        where="skimp.core.codecs.dynamic8:Dynamic8",
        attacks=("optimizer", "activations"),
        exact=False,
        saves="1 + 4/256 = 1.016 bytes per element instead of 4",
        paper=Paper("8-bit Optimizers via Block-wise Quantization", 2021, "2110.02861"),
    ),
    Facts(
        name="block4",
        kind="codec",
        summary="Store values as 4-bit codes in blocks of 128 with one float32 maximum each.",
        where="skimp.core.codecs.block4:Block4",
        attacks=("optimizer",),
        exact=False,
        saves="1/2 + 4/128 = 0.53 bytes per element instead of 4",
        paper=Paper("Memory Efficient Optimizers with 4-bit States", 2023, "2309.01507"),
        rules=("adamw4bit",),
    ),
]

_HOMES = {
    "Codec": "base",
    "from_meta": "base",
    "Float32": "float32",
    "BF16": "bf16",
    "stochastic_round": "bf16",
    "Dynamic8": "dynamic8",
    "Block4": "block4",
}

__all__ = ["BF16", "FACTS", "Block4", "Codec", "Dynamic8", "Float32", "from_meta", "stochastic_round"]

if TYPE_CHECKING:
    from skimp.core.codecs.base import Codec, from_meta
    from skimp.core.codecs.bf16 import BF16, stochastic_round
    from skimp.core.codecs.block4 import Block4
    from skimp.core.codecs.dynamic8 import Dynamic8
    from skimp.core.codecs.float32 import Float32


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"skimp.core.codecs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'skimp.core.codecs' has no attribute '{name}'")
