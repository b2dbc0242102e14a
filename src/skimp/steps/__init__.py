"""steps: how an update direction is obtained. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.core.registry import Facts, Paper

FACTS: list[Facts] = [
    Facts(
        name="first-order",
        kind="step",
        summary="backpropagation over micro-batches; every loss divides by the whole step's trained tokens",
        where="skimp.steps.first_order:FirstOrder",
        attacks=("activations",),
        exact=True,
        saves="activations of all but one micro-batch",
        recipe="exact: {micro_batch: 1}  # always on; this pins the rows of one forward",
    ),
    Facts(
        name="step-in-backward",
        kind="step",
        summary="each parameter moves as soon as its gradient is final, which is then freed; clipping in two passes",
        where="skimp.core.gradients:InBackward",
        attacks=("gradients",),
        exact=True,
        saves="4 bytes per parameter in float32 less the largest layer's; about 1.7 times the time with clipping",
        paper=Paper("Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023, "2306.09782"),
        needs=("the whole optimizer step as one micro-batch",),
        recipe="exact: {in_backward: true}",
    ),
]


def __getattr__(name: str) -> Any:
    if name == "FirstOrder":
        return import_module("skimp.steps.first_order").FirstOrder
    raise AttributeError(f"module 'skimp.steps' has no attribute '{name}'")
