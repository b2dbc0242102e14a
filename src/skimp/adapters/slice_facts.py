"""What is known of adapters that are parts of the weights themselves: slices of them, and their spectra."""

from __future__ import annotations

from skimp.core.option import Option
from skimp.core.registry import Conflict, Facts, Paper

_NO_CODES = Conflict(
    "spectra take the place of the weights and all of them train; codes are frozen",
    "adapter: lora on the coded base, or sst on a dense one",
)
_LENGTH_ONE = Conflict(
    "entries of a vector of length 1 are near 1 / sqrt(outputs); bfloat16's steps there are larger than a training "
    "step, and each return to length 1 would round the vector anew",
    "precision: bf16-mixed: float32 factors, products in bfloat16",
)

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
                "Which ones: random over all blocks, or in each block by the norm of their weights, of what they carry "
                "on the first rows of the run's text (activation), of both multiplied (product), or of their gradients "
                "there.",
                choices=("random", "weight", "activation", "product", "gradient"),
            ),
            "smallest": Option(False, "The smallest norms, not the largest; random has none."),
            "batches": Option(4, "Steps' rows of text that activation, product and gradient look at.", least=1),
            "permute": Option(
                False,
                "Move what trains side by side, each head and channel as a whole; the function stays, to rounding.",
            ),
        },
    ),
    Facts(
        name="sst",
        kind="adapter",
        summary="train linear layers as U diag(sigma) V': all singular values at every step, a few vectors at a time, "
        "drawn anew every so often; from scratch as well",
        where="skimp.adapters.sst:SST",
        attacks=("gradients", "optimizer"),
        exact=False,
        saves="a square layer of width m in float32 with AdamW takes 8 m^2 + 24 r m bytes instead of 16 m^2: less "
        "while r < m / 3. Weights alone grow to twice their bytes, and so do their products",
        paper=Paper(
            "Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural Networks", 2024, "2405.15481"
        ),
        conflicts={
            "bf16": _LENGTH_ONE,
            **dict.fromkeys(("nf4", "int8", "int4"), _NO_CODES),
        },
        shared=("targets",),
        options={
            "r": Option(64, "Singular vectors of each layer that train at a time.", least=1),
            "every": Option(200, "Optimizer steps of a draw.", least=2),
            "warmup": Option(20, "Steps over which the learning rate climbs back after a draw.", least=0),
            "mix": Option(0.5, "Share of the uniform part of the draw's probabilities.", least=0, most=1),
            "draws": Option(0, "Draws of a round; 0: as many as visit about all vectors, k / r.", least=0),
        },
    ),
]
