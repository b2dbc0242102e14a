"""The facts of the update rules beside AdamW, torch-free like the room's own list."""

from __future__ import annotations

from skimp.core.option import BETAS, Option
from skimp.core.registry import Conflict, Facts, Paper

STATES = Option("fp32", "Moments in float32, or in bf16 rounded at random.", choices=("fp32", "bf16"))


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
]

HOMES = {
    "Lion": "lion",
}
