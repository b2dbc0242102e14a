"""A planned step as data: over predicted seconds, with every place's fullest moment, and the peak in the picture."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_extend import CONFIGS, LATTICE, recipe

from skimp.core.exact import ExactChoices
from skimp.plan.drawn import PLACES, drawn
from skimp.plan.places import Places
from skimp.plan.plan import Plan
from skimp.plan.simulate import simulate


def planned(recipe_: Any, exact: ExactChoices, config: dict[str, Any]) -> Plan:
    profile = simulate(recipe_, exact, config)
    where = Places("cpu", 4 * 10**9, 4 * 10**9, 10**12, 400_000_000, ())
    return Plan(True, exact, profile, where, 10**9, 3.0, (), (), 0, "tiny", 3, recipe_.rows_per_step)


@pytest.mark.parametrize("name", ["held", "in backward"])
def test_the_picture_holds_the_plans_peak_and_takes_its_seconds(name: str) -> None:
    row, overrides = LATTICE[name]
    recipe_, config = recipe(*overrides), CONFIGS["llama"]
    plan = planned(recipe_, row, config)
    found = drawn(recipe_, config, plan)
    json.dumps(found)
    totals = [sum(parts) for parts in zip(*found["bytes"].values(), strict=True)]
    assert max(totals) == found["peak"]["total"] == plan.profile.peak.total
    fullest = totals.index(max(totals))
    assert found["names"][found["name"][fullest]] == plan.profile.peak.operator
    assert found["owners"][found["owner"][fullest]] == plan.profile.peak.owner
    micro = -(-recipe_.rows_per_step // row.micro_rows)
    assert found["seconds"][0] == 0
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][-1] == pytest.approx(3.0 * min(micro, 2) / micro)
    places = found["places"]
    assert len(places) <= PLACES
    assert places[0]["bytes"] == max(p["bytes"] for p in places) == plan.profile.peak.total
    for place in places:
        assert sum(place["by_category"].values()) == place["bytes"]
