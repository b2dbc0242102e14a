"""What is known of the low-rank family: one layer from parts, and the named choices of them."""

from __future__ import annotations

from skimp.core.registry import Facts, Paper

#: Keys of `adapter:` that every low-rank addition takes.
COMMON = ("r", "alpha", "scale", "targets", "dropout", "embeddings", "head", "init", "from")

LOW_RANK: list[Facts] = [
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
        shared=COMMON,
    )
]
