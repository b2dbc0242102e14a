"""steps: how an update direction is obtained. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.core.registry import Conflict, Facts, Paper

_NO_ADAPTER = Conflict(
    "an addition's gradients and moments are r (inputs + outputs) numbers a layer already; and B begins at 0, so that "
    "A gets no gradient until B has moved: a block that is active for a few steps would hardly learn",
    "the adapter alone, or train.layers alone: the drawn blocks then learn at full rank",
)
_FEW_STATES = Conflict(
    "states exist for the active blocks alone and begin at zero with every draw; moved elsewhere they would be written "
    "anew at every switch, to spare what one block less takes too",
    "fewer active blocks, or optimizer: adamw8bit, with the states in memory",
)
_ONE_SET = Conflict(
    "a step has one set of blocks that train, and each of the two says with what probability a block is in it",
    "one of them",
)

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
    Facts(
        name="lisa",
        kind="step",
        summary="a few blocks drawn evenly train at a time, the rest are frozen and have neither gradients nor moments",
        where="skimp.steps.layer_sampled:LayerSampled",
        attacks=("gradients", "optimizer", "activations"),
        exact=False,
        saves="12 bytes a parameter of every resting block in float32 with AdamW; inputs of their products",
        paper=Paper("LISA: Layerwise Importance Sampling for Memory-Efficient LLM Fine-Tuning", 2024, "2403.17919"),
        recipe="train: {layers: {name: lisa, active: 2, every: 20}}",
        conflicts={"adapter": _NO_ADAPTER, "state-offload": _FEW_STATES, "owlore": _ONE_SET, "badam": _ONE_SET},
    ),
    Facts(
        name="owlore",
        kind="step",
        summary="like lisa, but blocks with many outliers train more often; take it with a low-rank update rule",
        where="skimp.steps.layer_sampled:LayerSampled",
        attacks=("gradients", "optimizer", "activations"),
        exact=False,
        saves="as lisa; with low-rank states inside, more blocks train in the same memory",
        paper=Paper("OwLore: Outlier-weighed Layerwise Sampled Low-Rank Projection", 2024, "2405.18380"),
        recipe="train: {layers: {name: owlore, active: 5, every: 50}}",
        conflicts={"adapter": _NO_ADAPTER, "state-offload": _FEW_STATES, "badam": _ONE_SET},
    ),
    Facts(
        name="badam",
        kind="step",
        summary="block coordinate descent: each block trains once a round with fresh moments, the rest is frozen",
        where="skimp.steps.layer_sampled:LayerSampled",
        attacks=("gradients", "optimizer", "activations"),
        exact=False,
        saves="12 bytes a parameter of everything but one block in float32 with AdamW; activations below that block",
        paper=Paper("BAdam: A Memory Efficient Full Parameter Optimization Method for LLMs", 2024, "2404.02827"),
        recipe="train: {layers: {name: badam, active: 1, every: 100}}",
        conflicts={"adapter": _NO_ADAPTER, "state-offload": _FEW_STATES},
    ),
]


_WHERE = {
    "FirstOrder": "first_order",
    "LayerSampled": "layer_sampled",
    "LayerSampler": "layers",
    "Ordered": "draws",
    "Systematic": "draws",
    "Uniform": "draws",
    "outlier_scores": "outliers",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"skimp.steps.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'skimp.steps' has no attribute '{name}'")
