"""The next smaller plan for a run that is under way: the same search, told what was learned about the room there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from skimp.core.memory.process import Policy
from skimp.plan.make import make_plan
from skimp.plan.plan import Plan

#: An allocation that failed when the process held a share of what its plan takes leaves that share to plan for. One
#: that fails at the very start of a step says little about the rest of it: never less than half is given up at once.
LEAST_SHARE, MOST_SHARE = 0.5, 0.95


def with_less_disk(plan: Plan, recipe: Any, config: dict[str, Any], room: int) -> Plan | None:
    """The plan after a disk refused what blocks keep for backward.

    One that leaves no activation there, or else, where the disk is only full, one whose blocks keep their input alone,
    if that needs no more than was there. A pin on the place that failed cannot be honoured; all others are. Optimizer
    states that are on a disk have their room and stay. None when neither fits the budgets.

    Args:
        room: bytes that the run held on the disk when it was full; 0 for a disk that cannot be used any more.
    """
    for candidate in _less_disk(plan, recipe, room):
        found = make_plan(candidate, config, label=plan.model, offer=False, where=plan.places)
        if found.fits and (not found.exact.offload or found.profile.away.get("disk", 0) <= room):
            return found
    return None


def _less_disk(plan: Plan, recipe: Any, room: int) -> Iterator[Any]:
    pins = recipe.exact
    states = "none" if plan.exact.states == "device" else plan.exact.states
    here = pins.offload.model_copy(update={"activations": "none", "blocks": None, "optimizer": states})
    yield recipe.model_copy(update={"exact": pins.model_copy(update={"offload": here})})
    if room and pins.recompute is None and len(plan.exact.recompute) < plan.blocks:
        fewer = pins.offload.model_copy(update={"activations": "disk", "optimizer": states})
        yield recipe.model_copy(update={"exact": pins.model_copy(update={"offload": fewer, "recompute": "all"})})


def with_more_overhead(plan: Plan, recipe: Any, config: dict[str, Any], held: int) -> Plan | None:
    """The plan that fits the same budget when the process held `held` resident bytes, not `plan.peak_bytes`.

    What the plan did not know of (another library, a fragmented heap) is counted as the process's own from now on.
    None when none fits.
    """
    more = max(0, held - plan.peak_bytes)
    where = replace(plan.places, baseline=plan.places.baseline + more)
    found = make_plan(recipe, config, label=plan.model, offer=False, where=where)
    return found if found.fits and found.exact != plan.exact else None


def with_less_room(plan: Plan, recipe: Any, config: dict[str, Any], held: int, asked: int) -> Plan | None:
    """The plan after an allocator refused `asked` bytes (0: unknown) while the process held `held` resident bytes.

    The fastest plan that keeps within the share of tensors that was reached, or else the smallest there is; freed
    memory stays within a limit or is returned. What the recipe pins under `exact:` stays pinned. None when nothing
    takes fewer bytes of tensors.
    """
    where, tracked = plan.places, plan.profile.phases["train"]
    own = where.baseline if where.on_cpu else 0
    unknown = asked == 0
    reached = max((held - own) / max(1, plan.peak_bytes - own), 0.0 if unknown else 1 - asked / tracked)
    room = int(tracked * min(MOST_SHARE, max(LEAST_SHARE, reached)))
    if where.on_cpu:
        policy: Policy = recipe.exact.malloc or ("pool" if plan.exact.malloc == "pool" else "return")
        recipe = recipe.model_copy(update={"exact": recipe.exact.model_copy(update={"malloc": policy})})
        room = where.resident_peak(room, policy)
    found = make_plan(recipe, config, label=plan.model, offer=False, where=replace(where, device_budget=room))
    return found if found.profile.phases["train"] < tracked else None
