"""What is known of adapters beside the weights: networks that read it, and modules that keep no layer's input."""

from __future__ import annotations

from skimp.core.option import Option
from skimp.core.registry import Facts, Paper

SIDE: list[Facts] = [
    Facts(
        name="s2a",
        kind="adapter",
        summary="train shifts of the linear layers and a few prompt vectors a block: their gradients need no layer's "
        "input, so of frozen linear layers nothing is kept for backward",
        where="skimp.adapters.s2a:S2A",
        attacks=("activations", "gradients", "optimizer"),
        exact=False,
        saves="the input of every linear layer, and 12 bytes a parameter with AdamW; adds 16 bytes a trained number: "
        "the outputs of all layers, and rank x (prompt + hidden) a block. Goes with activations.derivative",
        paper=Paper(
            "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", 2025, "2503.08154"
        ),
        stages=("fine-tuning",),
        options={
            "bias": Option(True, "Train a shift of every linear layer below the head."),
            "prompt": Option(8, "Vectors before the text in every block; 0 for none.", least=0, kind="whole"),
            "rank": Option(4, "Rank of a block's prompts, written as a product.", least=1, kind="whole"),
        },
    ),
    Facts(
        name="qst",
        kind="adapter",
        summary="a side network r times narrower reads the frozen model's hidden states and trains; nothing is "
        "propagated back through the model, and nothing of it is kept",
        where="skimp.adapters.qst:QST",
        attacks=("activations", "gradients", "optimizer"),
        exact=False,
        saves="the model's activations but 1 / r of them, its backward, and 12 bytes a parameter with AdamW; "
        "adds 16 bytes a trained number, about 1 / r^2 of the model's blocks. A trained downsampler keeps tokens x "
        "hidden numbers a block, avgpool and maxpool none",
        paper=Paper(
            "Quantized Side Tuning: Fast and Memory-Efficient Tuning of Quantized Large Language Models",
            2024,
            "2401.07159",
        ),
        stages=("fine-tuning",),
        options={
            "reduce": Option(16, "How many times narrower than the model the side network is.", least=2, kind="whole"),
            "down": Option(
                "adapter:16",
                "From hidden states to the side's width: adapter:K or lora:K through K numbers, linear, avgpool, "
                "maxpool.",
            ),
            "gate": Option(
                "paper",
                "How model and side are mixed at the end: paper begins at the model to the bit, sigmoid 0.25 % off it "
                "and trains the way up from the first step.",
                choices=("paper", "sigmoid"),
            ),
        },
    ),
]
