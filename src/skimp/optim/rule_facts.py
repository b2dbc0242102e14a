"""The facts of the update rules beside AdamW, torch-free like the room's own list."""

from __future__ import annotations

from skimp.core.option import ADAM, BETAS, EPS, Option
from skimp.core.registry import Conflict, Facts, Paper

STATES = Option("fp32", "Moments in float32, or in bf16 rounded at random.", choices=("fp32", "bf16"))
#: An update that is a function of the whole tensor.
WHOLE = ("parameters that are not sharded: an update needs the whole matrix",)
#: Roles cannot be told from shapes.
ROLES = "groups with roles: role_groups(model.named_parameters(), weight_decay, roles(model))"


def uncoded(rule: str, instead: str = "adamw8bit") -> dict[str, Conflict]:
    """With the 8-bit codec: blocks of rounded moments would be another rule."""
    why = f"{rule} keeps its states as computed; rounded to 8 bits after every step they are those of another rule"
    return {"dynamic8": Conflict(why, instead)}


RULES: list[Facts] = [
    Facts(
        name="lion",
        kind="update rule",
        summary="Lion: the sign of a blended gradient, one moment.",
        where="skimp.optim.lion:Lion",
        attacks=("optimizer",),
        exact=False,
        saves="4 bytes of state per parameter instead of 8 (2 with bf16 states)",
        paper=Paper("Symbolic Discovery of Optimization Algorithms", 2023, "2302.06675"),
        options={"betas": Option((0.9, 0.99), BETAS.about, least=0, below=1), "states": STATES},
        conflicts=uncoded("lion"),
    ),
    Facts(
        name="adafactor",
        kind="update rule",
        summary="Adafactor: the second moment of a matrix as a row and a column, no first moment unless asked.",
        where="skimp.optim.adafactor:Adafactor",
        attacks=("optimizer",),
        exact=False,
        saves="4 (m + n) bytes of state for m x n parameters instead of 8 m n",
        paper=Paper("Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, "1804.04235"),
        needs=WHOLE,
        options={
            "decay": Option(0.8, "c in the second moment's decay 1 - t^-c.", least=0, most=1),
            "clip": Option(1.0, "Largest root mean square of an update, before the rate.", above=0),
            "momentum": Option(0.0, "Decay of a first moment of updates; 0 keeps none.", least=0, below=1),
            "relative": Option(False, "The rate counts in parts of each weight's root mean square."),
        },
        conflicts=uncoded("adafactor")
        | {
            "state-offload": Conflict(
                "its states are a row and a column of each matrix, a thousandth of the weights that stay: nothing is "
                "left to move",
                "adafactor alone, or adamw with state-offload",
            )
        },
    ),
    Facts(
        name="came",
        kind="update rule",
        summary="CAME: Adafactor with momentum, slowed where momentum and update disagree.",
        where="skimp.optim.came:CAME",
        attacks=("optimizer",),
        exact=False,
        saves="4 (m n + 2 (m + n)) bytes of state for m x n parameters instead of 8 m n",
        paper=Paper("CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023, "2307.02047"),
        needs=WHOLE,
        options={
            "betas": Option(
                (0.9, 0.999, 0.9999), "Decay of momentum, second moment and instability.", least=0, below=1
            ),
            "clip": Option(1.0, "Largest root mean square of an update, before the rate.", above=0),
        },
        conflicts=uncoded("came"),
    ),
    Facts(
        name="adam-mini",
        kind="update rule",
        summary="Adam-mini: one second moment a head, output neuron or token instead of one a number.",
        where="skimp.optim.adam_mini:AdamMini",
        attacks=("optimizer",),
        exact=False,
        saves="about 4 bytes of state per parameter instead of 8",
        paper=Paper("Adam-mini: Use Fewer Learning Rates To Gain More", 2024, "2406.16793"),
        needs=(ROLES,),
        options={
            **ADAM,
            "vectors": Option(
                "whole",
                "A norm gain as one block, or each number for itself (which shards).",
                choices=("whole", "element"),
            ),
        },
        conflicts=uncoded("adam-mini"),
    ),
    Facts(
        name="adamw4bit",
        kind="update rule",
        summary="AdamW with block-wise 4-bit moments (tensors under 4,096 elements keep float32).",
        where="skimp.optim.adamw4bit:AdamW4bit",
        attacks=("optimizer",),
        exact=False,
        saves="2 (1/2 + 4/128) = 1.06 bytes of state per parameter instead of 8",
        paper=Paper("Memory Efficient Optimizers with 4-bit States", 2023, "2309.01507"),
        options=ADAM,
        conflicts=uncoded("adamw4bit"),
    ),
    Facts(
        name="muon",
        kind="update rule",
        summary="Muon: orthogonalised momentum for hidden matrices, AdamW for embeddings, head and vectors.",
        where="skimp.optim.muon:Muon",
        attacks=("optimizer",),
        exact=False,
        saves="4 bytes of state per hidden weight instead of 8",
        paper=Paper("Muon is Scalable for LLM Training", 2025, "2502.16982"),
        needs=(ROLES, "hidden matrices that are not sharded"),
        options={
            "momentum": Option(0.95, "Decay of the momentum of hidden matrices.", least=0, below=1),
            "nesterov": Option(True, "Look ahead by one momentum step."),
            "ns_steps": Option(5, "Newton-Schulz steps.", least=1, most=20),
            "scale": Option(
                "match-rms",
                "An update's size: AdamW's, or spectral norm 1.",
                choices=("match-rms", "spectral"),
            ),
            "betas": Option((0.9, 0.95), "Decay of AdamW's moments, each per step.", least=0, below=1),
            "eps": EPS,
        },
        conflicts=uncoded("muon"),
    ),
    Facts(
        name="spam",
        kind="update rule",
        summary="SPAM: Adam that clips single gradient spikes and resets its moments; moments of a share of weights.",
        where="skimp.optim.spam:SPAM",
        attacks=("optimizer",),
        exact=False,
        saves="8 density bytes of state per hidden weight instead of 8 (density 1 unless set)",
        paper=Paper("SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training", 2025, "2501.06842"),
        options={
            "betas": BETAS,
            "eps": Option(1e-6, "Added to the root of the second moment, before the correction.", above=0),
            "theta": Option(5000.0, "A gradient's square is held to theta times the second moment; 0: never.", least=0),
            "every": Option(500, "Steps between resets of the moments; 0: none.", least=0),
            "warmup": Option(150, "Steps over which the rate climbs back after a reset.", least=0),
            "after": Option(20, "Steps at the start of a period in which nothing is clipped.", least=0),
            "density": Option(1.0, "Share of a hidden matrix's numbers that have moments and move.", above=0, most=1),
            "keep_count": Option(False, "The step of the bias correction runs on at a reset, as in the released code."),
        },
        conflicts=uncoded("spam"),
    ),
    Facts(
        name="stable-spam",
        kind="update rule",
        summary="Stable-SPAM: gradients clipped and scaled by their own history, and momentum resets.",
        where="skimp.optim.stable_spam:StableSPAM",
        attacks=(),
        exact=False,
        saves="nothing: 8 bytes of state per parameter; it steadies training in few bits",
        paper=Paper("Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam", 2025, "2502.17055"),
        needs=WHOLE,
        options={
            **ADAM,
            "gammas": Option((0.7, 0.9, 0.999), "Decay of norm, squared norm and largest number.", least=0, below=1),
            "every": Option(1000, "Steps between resets of the moments; 0: none.", least=0),
            "warmup": Option(0, "Steps over which the rate climbs back after a reset.", least=0),
        },
        conflicts=uncoded("stable-spam"),
    ),
    Facts(
        name="dion",
        kind="update rule",
        summary="Dion: momentum orthogonalised in low rank with error feedback, AdamW for the rest.",
        where="skimp.optim.dion:Dion",
        attacks=("optimizer",),
        exact=False,
        saves="4 (m n + n r) bytes of state for m x n hidden weights instead of 8 m n",
        paper=Paper("Dion: Distributed Orthonormalized Updates", 2025, "2504.05295"),
        needs=(ROLES, "hidden matrices that are not sharded"),
        options={
            "rank": Option(0.25, "Rank, as a share of a matrix's smaller side.", above=0, most=1),
            "momentum": Option(0.95, "Decay of what has been applied.", least=0, below=1),
            "betas": Option((0.9, 0.95), "Decay of AdamW's moments, each per step.", least=0, below=1),
            "eps": EPS,
        },
        conflicts=uncoded("dion"),
    ),
]

HOMES = {
    "Dion": "dion",
    "SPAM": "spam",
    "StableSPAM": "stable_spam",
    "AdamW4bit": "adamw4bit",
    "Muon": "muon",
    "Adafactor": "adafactor",
    "AdamMini": "adam_mini",
    "CAME": "came",
    "Lion": "lion",
}
