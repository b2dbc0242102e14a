"""The facts of the projected family, torch-free like the room's own list."""

from __future__ import annotations

from skimp.core.option import BETAS, EPS, Option
from skimp.core.registry import Conflict, Facts, Paper

RANK = Option(
    0, "Directions kept of every matrix between hidden states; 0 keeps a quarter of its shorter side.", least=0
)
REFRESH = Option(200, "Steps between bases; every matrix has a step of its own in the period.", least=1)
SCALE = Option(0.25, "Factor of the moves of projected matrices.", above=0)
STAGGER = Option(True, "Spread the changes of basis over the period, so that no step pays for all of them.")
STATES = Option(
    "fp32", "Moments in float32, in bf16 rounded at random, or coded in 8 bits.", choices=("fp32", "bf16", "int8")
)
POLICY = Option(
    "keep",
    "What becomes of the moments when the basis changes: keep reads them in the new one, align turns the new one "
    "towards the old, rotate carries them over, reset begins anew.",
    choices=("keep", "align", "rotate", "reset"),
)
INNER = Option(
    "adam", "The rule on the projected gradient.", choices=("adam", "lion", "adafactor", "muon")
)  # of float32 states but for adam
SVD = Option("exact", "How a basis is found: exact, or a randomised SVD.", choices=("exact", "random"))
RANDOM = Option("random", SVD.about, choices=SVD.choices)
GROWTH = Option(1.01, "The most by which the norm of the added part may grow from step to step.", least=1)
RELEASED = Option(False, "Eps and weight decay where the released code has them.")

COMPACT = Option(
    False, "Gradients of projected matrices arrive projected, and are never formed but for a new basis; no clipping."
)

REWARM = Option(0, "Steps over which a matrix's rate rises again after a change of its basis, below refresh.", least=0)

COMMON = {
    "betas": BETAS,
    "eps": EPS,
    "rank": RANK,
    "refresh": REFRESH,
    "stagger": STAGGER,
    "rewarm": REWARM,
}
CODED = {"states": STATES}
INT8 = {"states": Option("int8", STATES.about, choices=STATES.choices)}

UNCODED = Conflict(
    "its moments are turned from basis to basis, which mixes all rows: coded in 8 bits they would take on an error at "
    "every turn that nothing averages away",
    "galore8bit, whose moments stay where they are when the basis changes",
)


def _rule(
    name: str, summary: str, cls: str, saves: str, paper: Paper, options: dict[str, Option], **more: object
) -> Facts:
    facts = {"kind": "update rule", "attacks": ("optimizer",), "exact": False, **more}
    facts.setdefault("where", f"skimp.optim.presets:{cls}")
    return Facts(name=name, summary=summary, saves=saves, paper=paper, options=options, **facts)  # type: ignore[arg-type]


_GALORE = Paper("GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024, "2403.03507")
_AB = "of an a × b matrix (a ≤ b), in numbers: "

FAMILY: list[Facts] = [
    _rule(
        "galore",
        "GaLore: Adam in the leading subspace of the gradient, full weights.",
        "GaLore",
        f"{_AB}a·r + 2·b·r of state instead of 2·a·b",
        _GALORE,
        {**COMMON, "scale": SCALE, "svd": SVD, "policy": POLICY, **CODED, "inner": INNER, "as_released": RELEASED}
        | {"compact": COMPACT},
    ),
    _rule(
        "galore8bit",
        "GaLore with block-wise 8-bit moments.",
        "GaLore8bit",
        f"{_AB}a·r of float32 and 2·b·r of one byte instead of 2·a·b of float32",
        _GALORE,
        {**COMMON, "scale": SCALE, "svd": SVD, **INT8, "as_released": RELEASED, "compact": COMPACT},
    ),
    _rule(
        "galore2",
        "GaLore 2: the basis by a randomised SVD, warm from the last one.",
        "GaLore2",
        f"{_AB}a·r + 2·b·r of state instead of 2·a·b; a basis in a tenth of the time of an SVD",
        Paper("GaLore 2: Large-Scale LLM Pre-Training by Gradient Low-Rank Projection", 2025, "2504.20437"),
        {
            **COMMON,
            "scale": SCALE,
            "power": Option(1, "Power iterations of a change of basis, two products with the gradient each.", least=1),
            "warm": Option(True, "Begin at the last basis; false draws a new sketch each time."),
            "policy": POLICY,
            **CODED,
            "compact": COMPACT,
        },
    ),
    _rule(
        "q-galore",
        "Q-GaLore: a 4-bit basis, 8-bit moments, fewer changes of basis while they are alike; trains int8 weights.",
        "QGaLore",
        f"{_AB}a·r of half a byte and 2·b·r of one byte instead of 2·a·b of float32; with model.weights=int8 1.03 "
        "bytes a weight of the blocks instead of 4",
        Paper(
            "Q-GaLore: Quantized GaLore with INT4 Projection and Layer-Adaptive Low-Rank Gradients", 2024, "2407.08296"
        ),
        {
            **COMMON,
            "scale": SCALE,
            "bits": Option(4, "Bits of the basis, 4 or 8.", least=4, most=8),
            "svd": RANDOM,
            **INT8,
            "compact": COMPACT,
        },
        attacks=("optimizer", "weights"),
        trains=("int8",),
    ),
    _rule(
        "online-subspace-descent",
        "Online Subspace Descent: the basis is trained by a step of PCA after each step.",
        "OnlineSubspaceDescent",
        f"{_AB}3·a·r + 2·b·r of state instead of 2·a·b; no change of basis to wait for",
        Paper("Memory-Efficient LLM Training with Online Subspace Descent", 2024, "2408.12857"),
        {
            "betas": BETAS,
            "eps": EPS,
            "rank": RANK,
            "scale": SCALE,
            "pca_rate": Option(0.005, "Learning rate of the basis; it follows the schedule.", least=0),
            "ortho": Option(0.1, "Weight of the basis's distance from orthonormal.", least=0),
            **CODED,
        },
    ),
    _rule(
        "natural-galore",
        "Natural GaLore: the projected gradient times the inverse Fisher of the last few, then Adam.",
        "NaturalGaLore",
        f"{_AB}(a + b)·r + (2 + s)·r² of state instead of 2·a·b (s gradients of history)",
        Paper(
            "Natural GaLore: Accelerating GaLore for memory-efficient LLM Training and Fine-tuning", 2024, "2410.16029"
        ),
        {
            **COMMON,
            "scale": SCALE,
            "history": Option(20, "Projected gradients kept, the present one among them.", least=1),
            "damping": Option(1e-3, "λ of the Fisher, as a part of the mean squared length of the history.", above=0),
            "sides": Option("both", "Project both sides (r × r) or the shorter one (r × b).", choices=("both", "one")),
            "svd": RANDOM,
            **CODED,
            "compact": COMPACT,
        },
    ),
    _rule(
        "grass",
        "Grass: Adam on the rows of the gradient that matter; an index instead of a basis.",
        "Grass",
        f"{_AB}2·b·r + 2·r of state instead of 2·a·b; no product to project or to lift",
        Paper("Grass: Compute Efficient Low-Memory LLM Training with Structured Sparse Gradients", 2024, "2406.17660"),
        {
            **COMMON,
            "scale": SCALE,
            "rows": Option(
                "top",
                "The largest rows, or drawn by norm, squared norm, or alike.",
                choices=("top", "norm", "norm2", "uniform"),
            ),
            "replace": Option(False, "Draw with replacement, scaled to be without bias."),
            "decay_rest": Option(True, "Weight decay on rows that are not selected, too."),
            **CODED,
            "compact": COMPACT,
        },
    ),
    _rule(
        "apollo",
        "APOLLO: the raw gradient, each channel scaled as Adam scaled a random projection of it.",
        "Apollo",
        f"{_AB}2·b·r + 1 of state instead of 2·a·b",
        Paper("APOLLO: SGD-like Memory, AdamW-level Performance", 2024, "2412.05270"),
        {
            **COMMON,
            "scale": Option(1.0, "Its root multiplies the move.", above=0),
            "growth": GROWTH,
            "early": Option(False, "Apply the root of the scale before the limit of growth."),
            **CODED,
        },
    ),
    _rule(
        "apollo-mini",
        "APOLLO-Mini: rank 1, one factor for the whole matrix: the memory of SGD.",
        "ApolloMini",
        f"{_AB}2·b + 1 of state instead of 2·a·b",
        Paper("APOLLO: SGD-like Memory, AdamW-level Performance", 2024, "2412.05270"),
        {
            **COMMON,
            "rank": Option(1, RANK.about, least=0),
            "scale": Option(128.0, "Its root multiplies the move.", above=0),
            "growth": GROWTH,
            "early": Option(False, "Apply the root of the scale before the limit of growth."),
            **CODED,
        },
    ),
    _rule(
        "fira",
        "Fira: GaLore and the part it projects away, scaled and limited.",
        "Fira",
        f"{_AB}a·r + 2·b·r + 1 of state instead of 2·a·b",
        Paper("Fira: Can We Achieve Full-rank Training of LLMs Under Low-rank Constraint?", 2024, "2410.01623"),
        {**COMMON, "scale": SCALE, "svd": SVD, "growth": GROWTH, "as_released": RELEASED, **CODED},
    ),
    _rule(
        "ldadam",
        "LDAdam: a new basis every step, moments carried over, what is left out fed back.",
        "LDAdam",
        f"{_AB}a·r + 2·b·r of state and a·b of error instead of 2·a·b",
        Paper("LDAdam: Adaptive Optimization from Low-Dimensional Gradient Statistics", 2024, "2410.16103"),
        {
            "betas": Option((0.908, 0.99), BETAS.about, least=0, below=1),
            "eps": EPS,
            "rank": Option(16, RANK.about, least=0),
            "rho": Option(0.908, "The momentum's share of what the basis is fitted to.", least=0, most=1),
        },
        conflicts={"dynamic8": UNCODED},
    ),
    _rule(
        "frugal",
        "FRUGAL: Adam on a random share of rows, signs for the rest.",
        "Frugal",
        f"{_AB}2·b·r + 2·r of state instead of 2·a·b",
        Paper(
            "FRUGAL: Memory-Efficient Optimization by Reducing State Overhead for Scalable Training", 2024, "2411.07837"
        ),
        {
            **COMMON,
            "scale": Option(1.0, SCALE.about, above=0),
            "rest": Option(1.0, "Factor of the signs: 1 in pre-training, 0.1 in fine-tuning.", least=0),
            **CODED,
        },
    ),
    _rule(
        "compact",
        "CompAct: layers keep a random projection of their inputs; gradients and Adam's states live in its space.",
        "CompAct",
        "of an m × n matrix, in numbers: r of activations a token instead of n, m·r of gradient instead of m·n, 2·m·r "
        "of state instead of 2·m·n",
        Paper("CompAct: Compressed Activations for Memory-Efficient LLM Training", 2025, "2410.15352"),
        {
            "betas": BETAS,
            "eps": EPS,
            "rank": Option(
                0.25, "Directions kept of a layer's inputs: below 1, a part of them; else a number.", above=0
            ),
            "refresh": Option(50, "Steps between random projections, the same step for all layers.", least=1),
            "rewarm": REWARM,
            "scale": SCALE,
            "output_scale": Option(
                0.125,
                "Factor of the rate of attention's output projections, which stay whole; the paper: half of scale.",
                above=0,
            ),
            "share": Option(True, "Layers that read one tensor share a projection, and so keep one tensor."),
            "draw": Option("normal", "Entries of a projection: normal numbers, or signs.", choices=("normal", "signs")),
            "policy": Option(
                "keep", "The moments at a new projection: kept as they are, or reset.", choices=("keep", "reset")
            ),
            **CODED,
            "compact": Option(True, "Layers keep the projection only; false takes whole gradients and projects those."),
        },
        where="skimp.optim.compact_inputs:CompAct",
        attacks=("activations", "optimizer", "gradients"),
        recipe="optimizer: compact\ntrain: {clip: null}",
    ),
]

FAMILY_HOMES = {
    **dict.fromkeys([facts.where.rpartition(":")[2] for facts in FAMILY], "presets"),
    "CompAct": "compact_inputs",
    "Projected": "projected",
    "Stages": "stages",
    "project_backward": "compact",
}
