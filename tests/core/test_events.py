"""Events fire when due, once, in order, with their policy, and go on after a resume as if unbroken."""

from __future__ import annotations

import json

import pytest

from skimp.core.errors import CheckpointError, SkimpError
from skimp.core.events import Events, Firing, every


class Seen:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, str]] = []

    def event(self, name: str, period: int, moments: str = "keep", **kwargs):
        def action(firing: Firing) -> None:
            self.calls.append((name, firing.step, firing.count, firing.moments))

        return every(period, action, name=name, moments=moments, **kwargs)


def test_when_and_in_which_order_events_fire() -> None:
    seen = Seen()
    events = Events(
        seen.event("z_first", 3, "rotate", first=0),
        seen.event("a_second", 2, "reset"),
        seen.event("once", 100, "keep", first=4),
        seen.event("ends", 1, "align", first=1, until=3),
    )
    fired = [events.run(step) for step in range(8)]
    assert fired == [
        ["z_first"],
        ["ends"],
        ["a_second", "ends"],
        ["z_first"],
        ["a_second", "once"],
        [],
        ["z_first", "a_second"],
        [],
    ]
    assert [call for call in seen.calls if call[0] == "z_first"] == [
        ("z_first", 0, 0, "rotate"),
        ("z_first", 3, 1, "rotate"),
        ("z_first", 6, 2, "rotate"),
    ]
    assert events.due(8) == ["a_second"]


@pytest.mark.parametrize("stops", [(4,), (1, 2, 3, 5, 8, 9)])
def test_a_run_resumed_again_and_again_is_the_unbroken_one(stops: tuple[int, ...]) -> None:
    def build(seen: Seen) -> Events:
        return Events(seen.event("p", 3, first=0, warmup=2), seen.event("q", 4, "reset", warmup=1))

    whole, parts = Seen(), Seen()
    unbroken, resumed = build(whole), build(parts)
    for step in range(12):
        if step in stops:
            state = json.loads(json.dumps(resumed.state_dict()))
            resumed = build(parts)
            resumed.load_state_dict(state)
        unbroken.run(step)
        resumed.run(step)
        assert resumed.lr_factor(step) == unbroken.lr_factor(step)
    assert parts.calls == whole.calls
    assert resumed.state_dict() == unbroken.state_dict()


def test_a_repeated_step_fires_nothing_twice_and_steps_do_not_go_back() -> None:
    seen = Seen()
    events = Events(seen.event("p", 2))
    for step in (0, 1, 2, 2, 2, 3):
        events.run(step)
    assert [call[1] for call in seen.calls] == [2]
    with pytest.raises(SkimpError, match="step 3 was run before"):
        events.run(2)


def test_an_action_that_raises_has_not_fired() -> None:
    fail = True
    steps: list[int] = []

    def action(firing: Firing) -> None:
        if fail:
            raise RuntimeError("no memory")
        steps.append(firing.step)

    events = Events(every(2, action, name="p", moments="keep"))
    with pytest.raises(RuntimeError):
        events.run(2)
    fail = False
    assert events.run(2) == ["p"]
    assert steps == [2]


def test_skipped_steps_fire_late_rather_than_never() -> None:
    seen = Seen()
    events = Events(seen.event("p", 3))
    for step in (0, 5, 6, 8):
        events.run(step)
    assert [call[1] for call in seen.calls] == [5, 8]


def test_the_rate_warms_up_after_a_firing_but_not_after_step_0() -> None:
    seen = Seen()
    events = Events(seen.event("p", 5, first=0, warmup=3), seen.event("q", 6, warmup=1))
    factors = []
    for step in range(9):
        events.run(step)
        factors.append(events.lr_factor(step))
    # p fires at 5: 1/4, 2/4, 3/4. q fires at 6: 1/2. The lower one counts.
    assert factors == [1, 1, 1, 1, 1, 1 / 4, 1 / 2, 3 / 4, 1]


def test_an_adapted_period_is_saved_and_a_configured_one_is_not() -> None:
    seen = Seen()
    events = Events(seen.event("p", 2), seen.event("q", 3))
    events.run(2)
    events.set_period("p", 4)
    state = events.state_dict()
    other = Events(seen.event("p", 2), seen.event("q", 1))  # the recipe's period of q changed
    other.load_state_dict(state)
    assert (other.period("p"), other.period("q")) == (4, 1)
    assert other.due(5) == ["q"]
    assert other.due(6) == ["p", "q"]
    with pytest.raises(SkimpError, match="known: p, q"):
        other.set_period("x", 3)
    with pytest.raises(SkimpError, match="a period of 0"):
        other.set_period("p", 0)


def test_other_events_than_saved_are_refused() -> None:
    seen = Seen()
    state = Events(seen.event("p", 2)).state_dict()
    with pytest.raises(CheckpointError, match="saved: p"):
        Events(seen.event("p", 2), seen.event("q", 2)).load_state_dict(state)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"period": 0}, "every 0 steps"),
        ({"first": -1}, "first -1"),
        ({"warmup": -1}, "warm-up -1"),
        ({"warmup": 4}, "4 steps of warm-up, fired every 4"),
        ({"moments": "rotat"}, "did you mean 'rotate'"),
    ],
)
def test_values_out_of_range_are_refused(values: dict, found: str) -> None:
    with pytest.raises(SkimpError, match=found):
        Seen().event("p", **{"period": 4, **values})
    with pytest.raises(SkimpError, match="twice: p"):
        Events(Seen().event("p", 2), Seen().event("p", 2))


def test_the_moment_policy_has_no_default() -> None:
    with pytest.raises(TypeError, match="moments"):
        every(2, lambda firing: None, name="p")
