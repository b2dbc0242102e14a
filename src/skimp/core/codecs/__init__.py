"""core.codecs: storage formats, listed without importing them (no torch here)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from skimp.core.option import Option
from skimp.core.registry import Conflict, Facts, Paper

_FROZEN = Conflict(
    "weights in a codec are frozen codes; blocks that train in turn would move them, and a move smaller than a step "
    "between two levels is lost",
    "train.layers on dense weights, or an adapter on a coded base",
)
_FLOAT32_BESIDE = Conflict(
    "stochastic rounding is for trained bfloat16 weights; what trains beside a coded base is float32",
    "optimizer=adamw: with precision=bf16 the base decodes to bfloat16",
)
_ONE_CODEC = Conflict("a layer's weight is one set of codes", "one codec for the base")
_A_FACTOR = Conflict(
    "it trains factors of the weight itself, whose entries near 1 / sqrt(outputs) move by less than a step between two "
    "levels",
    "sst on dense weights, or adapter=lora on the coded base",
)
_ADAPTER = "an adapter: packed weights do not train"
_MOVED = "an adapter, or optimizer=q-galore, which trains the codes: no other rule moves packed weights"
_BESIDE = {"adamw-bf16": _FLOAT32_BESIDE, "lisa": _FROZEN, "owlore": _FROZEN, "badam": _FROZEN}

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
    Facts(
        name="nf4",
        kind="codec",
        summary="Store frozen weights as 4-bit codes at the quantiles of a normal distribution, in blocks of 64.",
        where="skimp.core.codecs.nf4:NF4",
        attacks=("weights",),
        exact=False,
        saves="4.127 bits per weight instead of 32 (4.5 without double quantisation)",
        paper=Paper("QLoRA: Efficient Finetuning of Quantized LLMs", 2023, "2305.14314"),
        stages=("fine-tuning",),
        needs=(_ADAPTER,),
        recipe="model: {name: …, weights: nf4}",
        conflicts={**_BESIDE, "int8": _ONE_CODEC, "int4": _ONE_CODEC},
        options={
            "block": Option(64, "Weights that share one maximum: 32, 64, 128, 256, …, 4096.", least=32, most=4096),
            "double_quant": Option(True, "Code the maxima too: 0.127 bits a weight instead of 0.5."),
        },
    ),
    *(
        Facts(
            name=f"int{bits}",
            kind="codec",
            summary=f"Store weights as {bits}-bit integers with a scale for every {group} of a row{more}.",
            where=f"skimp.core.codecs.integers:Int{bits}",
            attacks=("weights",),
            exact=False,
            saves=f"{bits + 32 / group:g} bits per weight instead of 32 ({bits + 64 / group:g} with zero points)",
            stages=("pre-training", "fine-tuning") if bits == 8 else ("fine-tuning",),
            needs=(_MOVED if bits == 8 else _ADAPTER,),
            recipe=f"model: {{name: …, weights: int{bits}}}",
            conflicts={**_BESIDE, **({"int4": _ONE_CODEC} if bits == 8 else {})},
            options={
                "group": Option(group, "Neighbours in a row that share one scale.", least=2, most=65536),
                "symmetric": Option(True, "Codes around 0; false adds a zero point to every group."),
            },
        )
        for bits, group, more in ((8, 128, "; frozen, or trained by q-galore"), (4, 64, "; frozen"))
    ),
    Facts(
        name="sketch",
        kind="codec",
        summary="Store frozen weights as 4-bit or 2-bit codes into a learned codebook for every row.",
        where="skimp.core.codecs.sketch:Sketch",
        attacks=("weights",),
        exact=False,
        saves="4 + 256 groups / inputs bits per weight instead of 32 (2 + 64 groups / inputs with 2 bits)",
        paper=Paper("Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", 2025, "2410.06364"),
        stages=("fine-tuning",),
        needs=(_ADAPTER,),
        recipe="model: {name: …, weights: sketch}",
        conflicts={**_BESIDE, "sst": _A_FACTOR, "nf4": _ONE_CODEC, "int8": _ONE_CODEC, "int4": _ONE_CODEC},
        options={
            "bits": Option(4, "4 or 2: sixteen or four values in a codebook.", least=2, most=4),
            "groups": Option(1, "Codebooks in a row.", least=1, most=64),
        },
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
    "NF4": "nf4",
    "Sketch": "sketch",
    "Int4": "integers",
    "Int8": "integers",
}

__all__ = [
    "BF16",
    "FACTS",
    "NF4",
    "Block4",
    "Codec",
    "Dynamic8",
    "Float32",
    "Int4",
    "Int8",
    "Sketch",
    "from_meta",
    "stochastic_round",
]

if TYPE_CHECKING:
    from skimp.core.codecs.base import Codec, from_meta
    from skimp.core.codecs.bf16 import BF16, stochastic_round
    from skimp.core.codecs.block4 import Block4
    from skimp.core.codecs.dynamic8 import Dynamic8
    from skimp.core.codecs.float32 import Float32
    from skimp.core.codecs.integers import Int4, Int8
    from skimp.core.codecs.nf4 import NF4
    from skimp.core.codecs.sketch import Sketch


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"skimp.core.codecs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'skimp.core.codecs' has no attribute '{name}'")
