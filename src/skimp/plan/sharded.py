"""Several cards, by formula: what each holds when weights, gradients and optimizer states are sharded over them.

Nothing here is simulated on more than one card, and a plan says so. The step of one card is simulated as ever, for its
share of the rows; then of every moment's bytes

    weights, gradients, optimizer, adapters → a share of 1/N

and the full weights of two units (a block, or the embedding) are added, the one that computes and the one gathered
ahead of it, and one unit's full gradient before it is reduced. This is ZeRO-3, or FSDP2 with every block a unit.
Time: a step's weights are gathered twice and its gradients reduced once, 3 (N - 1)/N of their bytes over the link,
taken to pass beside the computation as far as that lasts.

Papers: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", Rajbhandari et al., 2020,
arXiv 1910.02054, section 5; "PyTorch FSDP", Zhao et al., 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skimp.core.errors import RecipeError
from skimp.core.memory.tracker import CATEGORIES
from skimp.plan.profile import MemoryProfile

#: What is cut over the cards.
CUT = ("weights", "adapters", "gradients", "optimizer")
#: Bytes a second between two cards of a machine, each way: PCIe 4.0 with 16 lanes. NVLink is faster.
LINK = 20e9


def one_card(recipe: Any, cards: int) -> Any:
    """The recipe of one of `cards`: its share of a step's rows.

    Raises:
        RecipeError: the rows do not divide.
    """
    rows = recipe.rows_per_step
    if rows % cards:
        near = max(cards, rows // cards * cards)
        raise RecipeError(
            f"{cards} cards",
            f"{rows} rows of {recipe.data.seq_len} tokens a step",
            "every card takes the same number of rows",
            f"train.batch_tokens={near * recipe.data.seq_len}",
        )
    tokens = rows // cards * recipe.data.seq_len
    train = recipe.train.model_copy(update={"batch_tokens": tokens})
    return recipe.model_copy(update={"train": train})


def sharded(profile: MemoryProfile, cards: int, unit: int) -> MemoryProfile:
    """The profile of one of `cards`.

    Args:
        profile: of one card that holds everything.
        unit: bytes of the largest unit's weights.
    """
    if cards == 1:
        return profile
    shares = {place: _cut(found, cards, unit) for place, found in profile.shares.items()}
    by_category = dict(zip(CATEGORIES, _cut(_ordered(profile.peak.by_category), cards, unit), strict=True))
    fullest = max(shares, key=lambda place: sum(shares[place]), default=None)
    peak = replace(profile.peak, total=sum(by_category.values()), by_category=by_category)
    if fullest is not None and sum(shares[fullest]) >= peak.total:
        total, named = sum(shares[fullest]), dict(zip(CATEGORIES, shares[fullest], strict=True))
        operator = profile.operators.get(fullest, "")
        peak = replace(peak, total=total, by_category=named, phase=fullest[0], owner=fullest[1], operator=operator)
    resting = {k: -(-v // cards) if k in CUT else v for k, v in profile.resting.items()}
    gone = sum(profile.resting.values()) - sum(resting.values())
    phases = {k: max(0, v - gone) + 3 * unit for k, v in profile.phases.items()}
    moved = 3 * (cards - 1) / cards * sum(v for k, v in profile.resting.items() if k in ("weights", "adapters"))
    return replace(
        profile,
        peak=peak,
        resting=resting,
        phases={**phases, "train": peak.total},
        places={place: sum(found) for place, found in shares.items()},
        seconds=max(profile.seconds, moved / LINK),
        shares=shares,
        away={place: -(-size // cards) for place, size in profile.away.items()},
    )


def _ordered(by_category: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(by_category.get(name, 0) for name in CATEGORIES)


def _cut(found: tuple[int, ...], cards: int, unit: int) -> tuple[int, ...]:
    """Shares by category: those that are cut, and three units' worth of what is whole for a while."""
    cut = [-(-size // cards) if name in CUT else size for name, size in zip(CATEGORIES, found, strict=True)]
    cut[CATEGORIES.index("weights")] += 2 * unit
    cut[CATEGORIES.index("gradients")] += unit
    return tuple(cut)


def largest_unit(config: Mapping[str, Any], parameters: int, blocks: int, itemsize: int) -> int:
    """Bytes of the largest unit: the embedding, or one block's share of the rest.

    Args:
        parameters: of the whole model. itemsize: bytes of one.
    """
    vocab = int(config["vocab_size"])
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 0)
    tables = vocab * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return itemsize * max(vocab * hidden, -(-(parameters - tables) // blocks))
