"""A planned step as data for drawing: the simulated timeline, its fullest moments by place, and what was planned."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from skimp.core.memory.tracker import CATEGORIES
from skimp.plan.cost import Rates
from skimp.plan.plan import Plan
from skimp.plan.simulate import UNKNOWN_RATES, simulate

#: Blocks times micro-batches up to which two steps are simulated; a deeper one is drawn from its first.
TWO_STEPS = 64
#: Places listed, the fullest first.
PLACES = 40


def drawn(recipe: Any, config: dict[str, Any], plan: Plan, rates: Rates = UNKNOWN_RATES) -> dict[str, Any]:
    """The last simulated step of a plan in the form of a run's `timeline.json`, and `places`.

    Seconds are stretched so that the step takes what the plan predicts for the micro-batches that are drawn: two at
    most, because the third is like the second.

    Args:
        recipe, config: as for `make_plan`.
        plan: of them.
        rates: of the device, for the share of each operator in the step's seconds.
    """
    micro = -(-recipe.rows_per_step // plan.exact.micro_rows)
    part = min(micro, 2)
    steps = 2 if plan.blocks * part <= TWO_STEPS else 1
    target = "cpu" if plan.places.on_cpu else f"cuda:{plan.places.card.capability}"
    profile = simulate(
        recipe, plan.exact, config, rates=rates, target=target, steps=steps, micro_batches=part, timeline=True
    )
    if profile.timeline is None:  # pragma: no cover - asked for above
        raise AssertionError("a simulation without the timeline that was asked for")
    found = profile.timeline.as_dict()
    stretch = plan.seconds * part / micro / (found["seconds"][-1] or 1.0)
    found["seconds"] = [0.0, *(s * stretch for s in found["seconds"][1:])]  # an operator's bytes are there as it begins
    places = [
        {
            "phase": phase,
            "owner": owner,
            "bytes": size,
            "operator": profile.operators.get((phase, owner), ""),
            "by_category": {
                name: share
                for name, share in zip(CATEGORIES, profile.shares.get((phase, owner), ()), strict=False)
                if share
            },
        }
        for (phase, owner), size in sorted(profile.places.items(), key=lambda item: -item[1])[:PLACES]
    ]
    return {
        "step": steps,
        "simulated": {"micro_batches": part, "of": micro},
        "operators": found["operator"][-1] if found["operator"] else 0,
        "peak": asdict(profile.peak),
        "chosen": plan.exact.as_dict(),
        "places": places,
        **found,
    }
