"""What is known of the low-rank family: one layer from parts, and the named choices of them.

delta s B A × how A and B begin × what scales their product × what becomes of the rows × rates of A and B. A preset is
what a name fixes; every other part stays a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skimp.core.option import Option
from skimp.core.registry import Conflict, Facts, Paper

INITS = ("kaiming", "gaussian", "olora", "pissa", "pissa-fast", "loftq")
#: Those of which what A and B begin with is kept beside them.
KEPT = ("olora", "pissa", "pissa-fast", "loftq")
REPARAMS = ("plain", "dora", "weightnorm")

#: What each name fixes.
PRESETS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"scale": "rslora"},
    "lora-plus": {},
    "dora": {"reparam": "dora"},
    "olora": {"init": "olora"},
    "pissa": {"init": "pissa"},
    "loftq": {"init": "loftq"},
    "gradnormlorp": {"reparam": "weightnorm"},
    "relora": {"init": "kaiming", "reparam": "plain"},
}
_SHARED = ("r", "alpha", "scale", "targets", "dropout", "embeddings", "head", "init")

_OPTIONS: dict[str, Option] = {
    "reparam": Option(
        "plain",
        "What becomes of the rows of W + s B A: plain leaves them, dora trains their norms without a gradient through "
        "the row's own norm, weightnorm with it.",
        choices=REPARAMS,
    ),
    "ratio": Option(1.0, "Learning rate of B and of the norms over that of A.", above=0),
}
_FLOATS = "12 bytes a base parameter in float32 with AdamW; adds "
_LORA = "16 r (inputs + outputs) bytes a layer. Activations stay: go with recompute"
_ORIGIN = "20 r (inputs + outputs) bytes a layer (16 for what trains, 4 for what it began with)"
_NORMS = "16 r (inputs + outputs) + 16 outputs bytes a layer, and its product once more in backward"

_CODED = Conflict(
    "the product goes into the weight at every restart: a coded weight would be quantised anew each time, and what is "
    "below half a step of its codes would be lost",
    "adapter=lora on the coded base, or relora on a dense one",
)


def _preset(
    name: str,
    summary: str,
    saves: str,
    paper: Paper,
    recipe: str = "",
    options: Mapping[str, Option] | None = None,
    where: str = "skimp.adapters.lora:LoRA",
    conflicts: Mapping[str, Conflict] | None = None,
    needs: tuple[str, ...] = (),
) -> Facts:
    fixed = PRESETS[name]
    return Facts(
        name=name,
        kind="adapter",
        summary=summary,
        where=where,
        attacks=("gradients", "optimizer"),
        exact=False,
        saves=_FLOATS + saves,
        paper=paper,
        stages=("fine-tuning",),
        needs=needs,
        recipe=recipe,
        conflicts=conflicts or {},
        options={**{k: o for k, o in _OPTIONS.items() if k not in fixed}, **(options or {})},
        shared=(*(key for key in _SHARED if key not in fixed), *(("from",) if name == "lora" else ())),
    )


LOW_RANK: list[Facts] = [
    _preset(
        "lora",
        "train a product of two thin matrices beside each frozen linear layer; gradients and optimizer states "
        "exist for r (inputs + outputs) numbers a layer instead of inputs x outputs",
        _LORA,
        Paper("LoRA: Low-Rank Adaptation of Large Language Models", 2021, "2106.09685"),
    ),
    _preset(
        "rslora",
        "LoRA with the product scaled by alpha / sqrt(r): activations and gradients keep their size at large ranks",
        _LORA,
        Paper("A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023, "2312.03732"),
    ),
    _preset(
        "lora-plus",
        "LoRA with a higher learning rate for B than for A, which learns features faster at large widths",
        _LORA,
        Paper("LoRA+: Efficient Low Rank Adaptation of Large Models", 2024, "2402.12354"),
        options={"ratio": Option(16.0, "Learning rate of B over that of A; halve train.lr above 1.", above=0)},
    ),
    _preset(
        "dora",
        "LoRA as the direction of each row of the weight, beside a trained magnitude",
        _NORMS,
        Paper("DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, "2402.09353"),
    ),
    _preset(
        "olora",
        "LoRA that begins from the QR decomposition of the weight: B orthonormal, gradients of A from the first step",
        _ORIGIN,
        Paper("OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models", 2024, "2406.01775"),
    ),
    _preset(
        "pissa",
        "LoRA that begins from the largest singular values of the weight and trains these",
        _ORIGIN,
        Paper(
            "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models",
            2024,
            "2404.02948",
        ),
    ),
    _preset(
        "loftq",
        "LoRA on a coded base whose codes and product are fitted to each weight in turn, so that step 0 is nearer to "
        "the dense model",
        _ORIGIN,
        Paper("LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models", 2023, "2310.08659"),
        needs=("model.weights: codes and product are fitted to each other",),
        recipe="model: {name: …, weights: nf4}\nadapter: {name: loftq, r: 16}",
        options={
            "steps": Option(
                5,
                "Turns of coding W - s B A and decomposing what is left; the best is taken. 0: B = 0, as plain LoRA on "
                "the coded base.",
                least=0,
                most=100,
            ),
        },
        where="skimp.adapters.loftq:LoftQ",
    ),
    _preset(
        "gradnormlorp",
        "weight-normalised low-rank update, whose own gradients a projected optimizer shrinks again: states of "
        "2 k (inputs + outputs) numbers for k < r",
        _NORMS,
        Paper(
            "Gradient Weight-normalized Low-rank Projection for Efficient LLM Training",
            2024,
            "2412.19616",
        ),
        recipe="adapter: {name: gradnormlorp, r: 8, alpha: 16}\noptimizer: {name: galore, rank: 4, refresh: 200}",
        options={"r": Option(8, "Rank of every addition.", least=1)},
    ),
    _preset(
        "relora",
        "LoRA whose product goes into the weight every so many steps and begins anew: updates of high rank at the "
        "states of a low one",
        _LORA,
        Paper("ReLoRA: High-Rank Training Through Low-Rank Updates", 2023, "2307.05695"),
        options={
            "every": Option(1000, "Optimizer steps between two restarts.", least=1),
            "warmup": Option(100, "Steps over which the learning rate rises after a restart.", least=0),
        },
        where="skimp.adapters.relora:ReLoRA",
        conflicts=dict.fromkeys(("nf4", "int8", "int4", "sketch"), _CODED),
    ),
]
#: Every name of the family.
NAMES = tuple(PRESETS)
