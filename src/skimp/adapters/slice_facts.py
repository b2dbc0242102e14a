"""What is known of adapters that are parts of the weights themselves: slices of them, and their spectra."""

from __future__ import annotations

from skimp.core.option import Option
from skimp.core.registry import Facts, Paper

SLICES: list[Facts] = [
    Facts(
        name="s2ft",
        kind="adapter",
        summary="train a few whole attention heads and MLP channels as dense slices of frozen layers; gradients and "
        "states exist for the slices, and of the inputs of o and down only their columns are kept",
        where="skimp.adapters.s2ft:S2FT",
        attacks=("gradients", "optimizer", "activations"),
        exact=False,
        saves="12 bytes a base parameter in float32 with AdamW; adds 16 bytes a trained number. Kept inputs: of down "
        "tokens x k instead of tokens x inner width, of o tokens x k instead of tokens x hidden",
        paper=Paper(
            "S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity", 2024, "2412.06289"
        ),
        stages=("fine-tuning",),
        options={
            "v": Option(0.0, "Share of the key/value heads whose rows of the value projection train.", least=0, most=1),
            "o": Option(
                0.05, "Share of the query heads whose columns of the output projection train.", least=0, most=1
            ),
            "u": Option(0.0, "Share of the MLP's channels whose rows of the up projection train.", least=0, most=1),
            "d": Option(
                0.02, "Share of the MLP's channels whose columns of the down projection train.", least=0, most=1
            ),
            "select": Option(
                "random",
                "Which ones: random over all blocks, or by the norm of their weights in each block. By activations or "
                "gradients from Python.",
                choices=("random", "weight"),
            ),
            "smallest": Option(False, "With weight: the smallest norms, not the largest."),
            "permute": Option(
                False,
                "Move what trains side by side, each head and channel as a whole; the function stays, to rounding.",
            ),
        },
    ),
]
