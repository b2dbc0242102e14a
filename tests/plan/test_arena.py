"""Fixed addresses for a step's tensors: no two that live at once overlap, in two levels, and no more than is needed."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
from test_extend import CONFIGS, recipe
from test_reserve import WIDE, card

from skimp.core.errors import RecipeError
from skimp.core.exact import ExactChoices
from skimp.core.memory.trace import Trace, replay
from skimp.plan import addresses
from skimp.plan.addresses import Addresses, Request, floor, height, overlapping, place
from skimp.plan.arena import CARD_GRAIN, Arena, Replayed, Step, Stretch, arena, of_run, sentences, two_levels
from skimp.plan.make import make_plan
from skimp.plan.reserve import trace_of


def drawn(rng: random.Random, count: int, events: int) -> list[Request]:
    found = []
    for _ in range(count):
        birth = rng.randrange(events - 1)
        found.append(Request(rng.randint(1, 9), birth, rng.randint(birth + 1, events)))
    return found


def least(requests: list[Request]) -> int:
    """By trying every order: first-fit in the right order gives the least height (lay the best placement's requests by
    their addresses: each then falls no higher than it was)."""
    found = (addresses.greedy(requests, order) for order in itertools.permutations(range(len(requests))))
    return min(height(requests, offsets) for offsets in found)


@pytest.mark.parametrize("seed", range(25))
def test_no_two_overlap_and_the_height_is_the_least_there_is(seed: int) -> None:
    requests = drawn(random.Random(seed), 6, 10)
    found = place(requests)
    assert overlapping(requests, found.offsets) == []
    assert found.height == height(requests, found.offsets) == least(requests)
    assert found.floor == floor(requests) <= found.height
    assert found.least


def test_the_search_does_better_than_greedy_somewhere() -> None:
    better = 0
    for seed in range(60):
        requests = drawn(random.Random(1000 + seed), 14, 20)
        greedy, solved = place(requests, 0, 0), place(requests)
        assert overlapping(requests, solved.offsets) == []
        assert greedy.floor <= solved.height <= greedy.height
        better += solved.height < greedy.height
        assert (solved.by == "search") == (solved.height < greedy.height)
    assert better, "greedy was always the best: the search was never needed"


def test_the_floor_is_the_most_alive_at_once_and_death_frees_for_a_birth() -> None:
    assert floor([Request(3, 0, 2), Request(4, 2, 5)]) == 4
    assert floor([Request(3, 0, 3), Request(4, 2, 5), Request(1, 4, 6)]) == 7
    assert floor([]) == 0
    assert place([]) == Addresses((), 0, 0, True)


def test_an_overlap_is_found() -> None:
    requests = [Request(4, 0, 5), Request(4, 3, 8), Request(4, 5, 9)]
    assert overlapping(requests, (0, 2, 4)) == [(0, 1), (1, 2)]
    assert overlapping(requests, (0, 4, 0)) == []


def test_a_search_that_is_cut_off_says_so() -> None:
    requests = next(r for s in range(999) if not place(r := drawn(random.Random(s), 14, 20), 0, 0).least)
    found = place(requests, 0, nodes=3)
    assert overlapping(requests, found.offsets) == []
    assert not found.least


def test_the_integer_programme_finds_the_same_heights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where scipy is installed: the search and the solver are each other's oracle."""
    pytest.importorskip("scipy")
    asked = 0
    for seed in range(120):
        requests = drawn(random.Random(1000 + seed), 14, 20)
        greedy, solved = place(requests, 0, 0), place(requests, nodes=0)
        assert overlapping(requests, solved.offsets) == []
        assert solved.least
        assert solved.height == place(requests, 0, 10**6).height
        asked += greedy.height > greedy.floor
    assert asked


# ------------------------------------------------------------------------------------------------------ two levels
def random_step(rng: random.Random, aligned: bool) -> Step:
    """Two stretches with requests of their own, and others; `aligned`: these span whole stretches or miss them."""
    stretches = (Stretch(2, 8, "forward", 0), Stretch(10, 16, "forward", 1))
    requests = []
    for stretch in stretches:
        for _ in range(3):
            birth = rng.randint(stretch.begin, stretch.end - 3)
            requests.append(Request(rng.randint(1, 9), birth, rng.randint(birth + 1, stretch.end - 1)))
    edges = (0, 1, 2, 8, 9, 10, 16, 17) if aligned else tuple(range(18))
    for _ in range(3):
        birth, death = sorted(rng.sample(edges, 2))
        requests.append(Request(rng.randint(1, 9), birth, death))
    return Step(tuple(requests), stretches, 0)


@pytest.mark.parametrize("aligned", [True, False])
def test_two_levels_never_take_less_and_the_same_where_others_keep_out_of_stretches(aligned: bool) -> None:
    more = 0
    for seed in range(40):
        step = random_step(random.Random(seed), aligned)
        found, one = two_levels(step), place(step.requests)
        assert overlapping(step.requests, found.offsets) == []
        assert found.height == height(step.requests, found.offsets)
        assert found.floor == one.floor <= one.height <= found.height
        more += found.height > one.height
        if aligned:
            assert found.height == one.height
        assert arena(step).height <= found.height
        assert overlapping(step.requests, arena(step).offsets) == []
    assert aligned or more, "two levels were never worse: the test shows nothing"


def test_stretches_that_ask_for_the_same_share_one_solution() -> None:
    parts = [(3, 0, 2), (5, 1, 4), (2, 3, 5)]
    stretches = tuple(Stretch(10 * k, 10 * k + 9, "forward", k) for k in range(7))
    requests = tuple(Request(size, 10 * k + b, 10 * k + d) for k in range(7) for size, b, d in parts)
    found = two_levels(Step(requests, stretches, 11))
    assert found.solved == (1, 1)
    assert found.local == len(requests)
    assert len({found.offsets[i : i + 3] for i in range(0, 21, 3)}) == 1
    assert found.resting == 11
    assert found.height == 8


# ------------------------------------------------------------------------------------------------------ real steps
CASES = {
    "kept": ExactChoices(2),
    "recomputed": ExactChoices(1, (0, 1, 2)),
    "in-backward": ExactChoices(2, (0,), None, True),
    "away": ExactChoices(2, offload=(0, 1), offload_to="host"),
}


def step_of(name: str) -> tuple[Trace, Step, Arena]:
    described = recipe("train.clip=null") if name == "in-backward" else recipe()
    config = {**CONFIGS["gpt2"], "n_layer": 3} if name == "kept" else WIDE
    trace = trace_of(described, config, CASES[name], card(10**10))
    step = Step.of(trace, CARD_GRAIN)
    return trace, step, arena(step, seconds=2.0)


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_an_arena_takes_no_more_than_the_allocator_reserves(name: str) -> None:
    trace, step, found = step_of(name)
    assert len({(s.phase, s.block) for s in step.stretches if s.block >= 0}) >= 6
    assert found.local > len(step.requests) // 4
    assert overlapping(found.requests, found.offsets) == []
    assert all(at % CARD_GRAIN == 0 for at in found.offsets)
    assert found.floor <= found.height <= 1.15 * found.floor
    # Beside it lie the weights and what a step finds, each in whole grains.
    assert found.height + step.resting <= replay(trace, steps=3).reserved
    assert found.solved[0] < len({(s.phase, s.block, s.begin) for s in step.stretches})


def test_the_same_plan_serves_ten_steps_without_another_byte_and_says_when_it_does_not() -> None:
    trace, _, found = step_of("recomputed")
    assert Replayed.of(found, trace, CARD_GRAIN, steps=10) == Replayed(0, 0)
    other = replace(found, offsets=(0,) * len(found.offsets))
    assert Replayed.of(other, trace, CARD_GRAIN).misses
    longer = trace_of(recipe("data.seq_len=32", "train.batch_tokens=64"), WIDE, CASES["recomputed"], card(10**10))
    missed = Replayed.of(found, longer, CARD_GRAIN)
    assert missed.elsewhere > 0


def test_a_plan_has_one_where_it_is_asked_for() -> None:
    pinned = ("exact.micro_batch=2", "exact.recompute=1", "exact.in_backward=false", "exact.keep=nothing")
    described = recipe(*pinned, "exact.loss_chunk=64", "exact.offload={activations: none, optimizer: none}")
    where = card(10**10)
    assert make_plan(described, WIDE, where=where).as_dict()["arena"] is None
    found = make_plan(described, WIDE, where=where, also=("arena",)).as_dict()["arena"]
    assert json.loads(json.dumps(found)) == found
    assert found["least"] == (found["height_bytes"] == found["floor_bytes"])
    with pytest.raises(RecipeError, match="4 cards by formula"):
        of_run(described, WIDE, ExactChoices(1), replace(where, count=4))


def test_it_is_told_in_words_and_as_data() -> None:
    found = of_run(recipe(), WIDE, CASES["kept"], card(10**10))
    said = sentences(found)
    assert found["height_bytes"] >= found["floor_bytes"] > 0
    assert found["reserved_bytes"] >= found["height_bytes"] + found["resting_bytes"]
    assert "less than the" in said[2]
    assert f"{found['requests']:,} tensors at fixed addresses" in said[0]
