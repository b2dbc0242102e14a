"""The cards a run may be planned for: what a driver shows of the size on the box, and how fast they are.

`cards.json` is data from vendors' sheets and from what drivers report. A run on a real card asks the card;
these figures are for planning without one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from skimp.core.errors import RecipeError, did_you_mean
from skimp.core.units import format_bytes

GIB = 2**30

#: Usable share of the size on the box for a size no card of the table has: the smallest share among the
#: cards of the table (T4: 14.55 of 16 GiB = 0.909, with error correction on), rounded down, so that a plan
#: for an unknown card errs on the safe side.
UNKNOWN_SHARE = 0.9


@dataclass(frozen=True)
class Card:
    """One accelerator.

    Attributes:
        name: lower case, such as "rtx-4090".
        size_gb: the size on the box, as a number; vendors call 2**30 bytes a GB here.
        usable_bytes: what the driver lets processes allocate, all processes together.
        context_bytes: what the driver and loaded kernels take of it for one process; an assumption,
            measured when the run is on the card.
        workspace_bytes: what PyTorch gives each handle of the matrix library, through its allocator; an assumption.
        capability: CUDA compute capability, such as "8.9"; a gfx name for AMD; "" when not known.
        bf16_tflops: dense bfloat16 rate with float32 accumulation, 10**12 operations a second; None without
            bfloat16 matrix units.
        fp32_tflops: float32 rate outside the matrix units.
        bandwidth_gbs: memory bandwidth, 10**9 bytes a second.
        basis: where the usable size comes from, for the plan to print.
    """

    name: str
    size_gb: int
    usable_bytes: int
    context_bytes: int
    workspace_bytes: int
    capability: str
    bf16_tflops: float | None
    fp32_tflops: float
    bandwidth_gbs: float
    basis: str = ""

    @property
    def budget_bytes(self) -> int:
        """What tensors of one process may take: usable less context."""
        return self.usable_bytes - self.context_bytes


@dataclass(frozen=True)
class Gpus:
    """So many cards of one kind."""

    card: Card
    count: int = 1


@lru_cache(maxsize=1)
def cards() -> dict[str, Card]:
    """All known cards by name."""
    table = json.loads(resources.files("skimp.recipe").joinpath("cards.json").read_text(encoding="utf-8"))
    found = {}
    for row in table["cards"]:
        usable = int(row.pop("usable_gib") * GIB)
        context = int(row.pop("context_mb") * 10**6)
        workspace = row.pop("blas_workspace_kib") * 1024
        row.pop("aliases", None)
        basis = f"{row['name']}: {format_bytes(usable)} usable of {row['size_gb']} GB, less "
        f"{format_bytes(context)} of context"
        found[row["name"]] = Card(
            usable_bytes=usable, context_bytes=context, workspace_bytes=workspace, basis=basis, **row
        )
    return found


@lru_cache(maxsize=1)
def card_names() -> dict[str, str]:
    """Every spelling of a card -> its name."""
    table = json.loads(resources.files("skimp.recipe").joinpath("cards.json").read_text(encoding="utf-8"))
    return {plain(alias): row["name"] for row in table["cards"] for alias in [row["name"], *row.get("aliases", [])]}


def plain(name: str) -> str:
    """'NVIDIA GeForce RTX 4090' and 'rtx-4090' alike: lower case, no vendor words, no separators."""
    lowered = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", lowered)


def resolve_gpu(text: str) -> Gpus:
    """Read '24GB' (any card sold as 24 GB), 'rtx-4090', '8x80GB' or '2x rtx-3090'.

    Raises:
        RecipeError: an unknown card (with near names), or a size no card could have.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text)
    count, name = (int(match.group(1) or 1), match.group(2)) if match else (1, text)
    if count < 1:
        raise RecipeError(f"device '{text}'", "no cards", instead="8x80GB, or one card: 80GB")
    sized = re.fullmatch(r"(\d+)\s*(?:gb|gib|g)", name.lower())
    if sized:
        return Gpus(_of_size(int(sized.group(1)), text), count)
    known = card_names()
    if plain(name) in known:
        return Gpus(cards()[known[plain(name)]], count)
    raise RecipeError(
        f"device '{text}'",
        "no such card",
        f"'{name}' is not in the card table",
        [did_you_mean(name.lower(), cards()), "or give the size on the box: 24GB"],
    )


def _of_size(size_gb: int, text: str) -> Card:
    """A card of that marketing size: the least usable memory and the slowest rates of the cards sold so."""
    if not 1 <= size_gb <= 1024:
        raise RecipeError(f"device '{text}'", f"{size_gb} GB", "no card has that size", "the size on the box: 24GB")
    same = [card for card in cards().values() if card.size_gb == size_gb]
    if same:
        least = min(same, key=lambda card: card.budget_bytes)
        bf16 = [card.bf16_tflops for card in same if card.bf16_tflops is not None]
        basis = f"{size_gb} GB cards: the least any of {len(same)} known ones gives, {least.basis}"
    else:
        least = min(cards().values(), key=lambda card: abs(card.size_gb - size_gb))
        same = [least]
        bf16 = [least.bf16_tflops] if least.bf16_tflops is not None else []
        usable = int(size_gb * GIB * UNKNOWN_SHARE)
        context = max(card.context_bytes for card in cards().values())
        least = replace(least, usable_bytes=usable, context_bytes=context)
        if least.budget_bytes <= 0:
            raise RecipeError(
                f"device '{text}'", f"{size_gb} GB", "the driver's context alone takes that", "4GB or more"
            )
        basis = (
            f"no known card has {size_gb} GB: {UNKNOWN_SHARE:.0%} of it, {format_bytes(usable)}, less "
            f"{format_bytes(context)} of context; rates of {same[0].name}"
        )
    return Card(
        name=f"{size_gb}GB",
        size_gb=size_gb,
        usable_bytes=least.usable_bytes,
        context_bytes=least.context_bytes,
        workspace_bytes=max(card.workspace_bytes for card in same),
        capability=least.capability,
        bf16_tflops=min(bf16) if bf16 else None,
        fp32_tflops=min(card.fp32_tflops for card in same),
        bandwidth_gbs=min(card.bandwidth_gbs for card in same),
        basis=basis,
    )
