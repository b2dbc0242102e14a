"""The smallest exact run: whether anything fits at all, which costs a few small simulations and no search.

Every block is recomputed and keeps nothing, logits exist in the smallest chunks, gradients are freed in backward; what
the recipe pins stays as it is. Where that does not fit, optimizer states and then the blocks' inputs wait elsewhere,
unless the recipe or its other techniques forbid it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from skimp.activations.offload import choose
from skimp.core.exact import ExactChoices
from skimp.core.structure import layers_of
from skimp.plan.make import compared, device_rates, fits_elsewhere
from skimp.plan.offers import smallest_row
from skimp.plan.offloading import OffloadingSearch
from skimp.plan.places import Places, budgets
from skimp.plan.profile import MemoryProfile
from skimp.plan.reserve import reserve
from skimp.plan.sharded import one_card


def least(recipe: Any, config: dict[str, Any], where: Places) -> tuple[int, bool]:
    """Bytes that the smallest run takes of the computing device, and whether it fits everywhere.

    Of several places for what may wait elsewhere the first that fits; else the last.

    Raises:
        ConflictError: as the search.
    """
    recipe = one_card(recipe, where.count)
    target = "cpu" if where.on_cpu else f"cuda:{where.card.capability}"
    blocks, rates = int(config[layers_of(config)]), device_rates(where, recipe, config)
    search = OffloadingSearch(recipe, config, blocks, budgets(where, recipe), rates, target, where.count)
    peak, fits = 0, False
    for exact in _ways(search):
        profile = search.proved(exact)
        peak = _taken(search, profile, where)
        fits = peak <= where.device_budget and fits_elsewhere(search.recipe, profile, where)
        if fits:
            break
    return peak, fits


def _ways(search: OffloadingSearch) -> Iterator[ExactChoices]:
    """Nothing away, states away, activations too, as far as the recipe allows."""
    row, again = smallest_row(search)
    here = replace(search.exact(row, again), malloc=min(search.budgets, key=lambda p: -search.budgets[p][0]))
    for home in search.homes:
        for place in search.places:
            made = replace(here, states=home or "device")
            if place is not None:
                made = replace(made, offload_to=place, offload=search.named or choose(search.blocks, search.blocks))
            if place is None or home is not None or len(search.homes) == 1:
                yield made


def _taken(search: OffloadingSearch, profile: MemoryProfile, where: Places) -> int:
    if where.on_cpu:
        return compared(where, profile.peak_bytes, profile.exact.malloc, 0)
    tensors = profile.peak_bytes + 2 * where.card.workspace_bytes
    if where.count > 1 or tensors > where.device_budget:
        return tensors
    return reserve(search.recipe, search.config, profile.exact, where, target=search.target).reserved
