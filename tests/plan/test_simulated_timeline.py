"""The simulated timeline of a step is the watched one: the same operators under the same numbers, the same bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from test_extend import CONFIGS, LATTICE, recipe

from skimp.core.memory.timeline import Timeline
from skimp.core.memory.tracker import CATEGORIES, Tracker
from skimp.data import synthetic_batch
from skimp.plan import simulate as simulation
from skimp.plan.simulate import simulate
from skimp.run.build import build
from skimp.run.weights import init_scratch

#: Every point is kept: which ones a shorter timeline merges depends on where it begins.
ALL = 10**6


def watched(recipe_: Any, exact: Any, config: dict[str, Any], documents: tuple[int, ...]) -> tuple[int, dict[str, Any]]:
    """Operators and timeline of a second real step, as the loop watches it."""
    run = build(recipe_, exact, config, fill=lambda model: init_scratch(model, 0))
    run.set_lr(1e-3)
    batch = synthetic_batch(recipe_.data.seq_len, recipe_.rows_per_step, config["vocab_size"], documents)
    run.step(batch)
    timeline = Timeline(CATEGORIES, limit=ALL)
    tracker = Tracker(timeline=timeline)
    run.show_to(tracker, batch)
    with tracker:
        run.step(batch)
    run.close()
    return tracker.count, timeline.as_dict()


def points(drawn: dict[str, Any]) -> list[tuple[Any, ...]]:
    """(operator, phase, owner, bytes) of every point but those before the first operator."""
    found = [
        (
            drawn["operator"][i],
            drawn["phases"][drawn["phase"][i]],
            drawn["owners"][drawn["owner"][i]],
            *(drawn["bytes"][name][i] for name in CATEGORIES),
        )
        for i in range(len(drawn["operator"]))
    ]
    return [point for point in found if point[0] > 0]


@pytest.mark.parametrize("name", ["held", "in backward"])
@pytest.mark.parametrize("documents", [1, 2, 5])
def test_a_simulated_timeline_is_the_watched_one_point_by_point(
    name: str, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "Timeline", partial(Timeline, limit=ALL))
    row, overrides = LATTICE[name]
    recipe_, config = recipe(*overrides), CONFIGS["llama"]
    seq = recipe_.data.seq_len
    cuts = tuple(seq * i // documents for i in range(documents + 1))
    count, real = watched(recipe_, row, config, cuts)
    found = simulate(recipe_, row, config, timeline=True, documents=cuts).timeline
    assert found is not None
    simulated = found.as_dict()
    assert simulated["stride"] == real["stride"] == 1
    assert max(simulated["operator"]) <= count
    assert points(simulated) == points(real)


def test_documents_are_what_a_simulated_step_has_more_operators_for() -> None:
    """A plan takes two documents a row, the costliest split; a watched step as many as its rows have."""
    row, overrides = LATTICE["held"]
    recipe_, config = recipe(*overrides), CONFIGS["llama"]
    seq = recipe_.data.seq_len
    numbers = [
        simulate(recipe_, row, config, timeline=True, documents=d).timeline.as_dict()["operator"][-1]  # type: ignore[union-attr]
        for d in ((0, seq), (0, seq - 1, seq), None)
    ]
    assert numbers[0] < numbers[1] == numbers[2]
