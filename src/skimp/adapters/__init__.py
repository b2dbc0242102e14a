"""adapters: small additions to a frozen base. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.core.registry import Facts, Paper

FACTS: list[Facts] = [
    Facts(
        name="lora",
        kind="adapter",
        summary="train a product of two thin matrices beside each frozen linear layer; gradients and optimizer states "
        "exist for r (inputs + outputs) numbers a layer instead of inputs x outputs",
        where="skimp.adapters.lora:LoRA",
        attacks=("gradients", "optimizer"),
        exact=False,
        saves="12 bytes a base parameter in float32 with AdamW; adds 16 r (inputs + outputs) bytes a layer. "
        "Activations stay: go with recompute",
        paper=Paper("LoRA: Low-Rank Adaptation of Large Language Models", 2021, "2106.09685"),
        stages=("fine-tuning",),
    )
]

_WHERE = {
    "LoRA": "lora",
    "Spec": "spec",
    "lora_linear": "linear",
    "lora_linear_reference": "linear",
    "match": "targets",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"skimp.adapters.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'skimp.adapters' has no attribute '{name}'")
