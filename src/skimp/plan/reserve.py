"""What a card must give for a plan: the very step replayed through the allocator's model.

Tensors are one thing, what PyTorch takes from the driver for them another: blocks are rounded up, lie in segments and
leave pieces that nothing fits into; the matrix library's workspaces come on top. So on a card the plan's peak is the
reserved one. If that is more than there is, the allocator gives cached segments back when the driver refuses, at the
cost of a wait each: the trace is then replayed against the very budget, and fits if no request fails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skimp.core.exact import ExactChoices
from skimp.core.memory.cuda_settings import AllocatorSettings, settings_here
from skimp.core.memory.trace import Reservation, Trace, replay
from skimp.core.units import format_bytes
from skimp.plan.places import Places
from skimp.plan.simulate import simulate

if TYPE_CHECKING:
    from skimp.plan.profile import MemoryProfile
    from skimp.plan.search import Candidate, Search

#: Steps replayed: the pieces that the first leaves decide what the second reserves; a third changed nothing seen.
STEPS = 3
#: Searches with less room before the smallest overshoot is accepted as the answer.
TRIES = 4


def reserve(
    recipe: Any,
    config: dict[str, Any],
    exact: ExactChoices,
    where: Places,
    settings: AllocatorSettings | None = None,
    target: str = "cuda",
) -> Reservation:
    """Peaks of the allocator on the card of `where` for a run with these choices.

    Two micro-batches of one step are simulated in full, later ones are alike; the step is replayed several times.
    """
    trace = trace_of(recipe, config, exact, where, target)
    settings = settings_here() if settings is None else settings
    free = replay(trace, settings, steps=STEPS)
    if free.reserved <= where.device_budget:
        return free
    tight = replay(trace, settings, where.device_budget, STEPS)
    return tight if tight.fits else replace(free, fits=False, place=tight.place)


def trace_of(recipe: Any, config: dict[str, Any], exact: ExactChoices, where: Places, target: str = "cuda") -> Trace:
    """The allocations and releases of a run on the card."""
    trace = Trace(where.card.workspace_bytes)
    simulate(recipe, exact, config, target=target, steps=1, micro_batches=2, short=True, evaluate=True, trace=trace)
    return trace


def best_reserved(search: Search, where: Places) -> tuple[MemoryProfile, list[Candidate], float, Reservation]:
    """`search.best` for what the card must give: while it does not fit, the search is run again with less room.

    Raises:
        ConflictError: as the search.
    """
    (policy, (_, slower)), *_ = search.budgets.items()
    for tried in range(TRIES):
        profile, found, seconds = search.best()
        reservation = reserve(search.recipe, search.config, profile.exact, where, target=search.target)
        if reservation.fits or not search.fits(profile):
            break
        over = reservation.reserved - where.device_budget + tried * settings_here().large_segment
        search.budgets = {policy: (profile.peak_bytes - over, slower)}
    return profile, found, seconds, reservation


def assumptions(where: Places, reservation: Reservation) -> list[str]:
    """What a plan for a card takes as given, and what the allocator does there, in sentences."""
    card = where.card
    said = [
        f"assumed of {card.name}: {format_bytes(card.context_bytes)} of context outside PyTorch's allocator, "
        f"{format_bytes(card.workspace_bytes)} of workspace for each of two handles of the matrix library inside it",
        f"allocator ({reservation.settings}): {format_bytes(reservation.allocated)} allocated, "
        f"{format_bytes(reservation.reserved)} reserved",
    ]
    if reservation.retries:
        said.append(
            f"the driver runs short {reservation.retries} times in {STEPS} steps; cached segments then go back to it, "
            "and the card is waited for; expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF may need less"
        )
    return said
