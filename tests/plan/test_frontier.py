"""The search is brute force's equal; more room is never slower; what is drawn and swept is what is planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skimp.core.errors import RecipeError
from skimp.core.exact import ExactChoices
from skimp.plan.cost import CostMeter, Rates
from skimp.plan.frontier import Point, explain, frontier, sentence
from skimp.plan.mixed import MixedSearch as Search
from skimp.plan.places import Places
from skimp.plan.search import Candidate
from skimp.plan.simulate import simulate
from skimp.plan.sweep import largest, parse, sweep
from skimp.recipe import load_recipe
from skimp.report.frontier_picture import frontier_svg

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "vocab_size": 301,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RATES = Rates(1e11, 2e10, "a test's", attention=4e10, dense=1e10, call=1e-6)
CARD = Places("a card", 10**12, 10**12, 10**12, 0, ())


def recipe(*overrides: str, seq: int = 320) -> Any:
    values = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": seq, "validation": None}, "output": "runs/none",
        "train": {"steps": 2, "batch_tokens": 2 * seq}, "eval": None,
    }  # fmt: skip
    return load_recipe(values, overrides)


def searched(described: Any, budget: int, known: Search | None = None) -> Search:
    """A search that has what another one has simulated."""
    search = Search(described, CONFIG, 4, {"return": (budget, 0.0)}, RATES, "cuda")
    if known is not None:
        search._profiles, search._corners, search._rows = known._profiles, known._corners, known._rows
    return search


def brute_force(search: Search) -> list[tuple[int, float]]:
    """(peak, seconds) of every point of the lattice, each simulated in full."""
    found = []
    for row in search.lattice.everywhere():
        for count in range(5):
            if count or row.keep == "nothing":
                profile = search.full(search.exact(row, count), short=True)
                found.append((profile.peak_bytes, profile.seconds))
    return found


PINS = [
    ("exact.in_backward=false", "exact.loss_chunk=64", "exact.keep=nothing"),
    pytest.param((), marks=pytest.mark.slow),
    pytest.param(("train.clip=null",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("pins", PINS)
def test_the_optimum_is_brute_forces_and_more_room_is_never_slower(pins: tuple[str, ...]) -> None:
    known = searched(recipe(*pins), 10**12)
    points = brute_force(known)
    least, most = min(p for p, _ in points), max(p for p, _ in points)
    last = float("inf")
    for budget in [least - 1, *(least + (most - least) * n // 12 for n in range(13))]:
        search = searched(recipe(*pins), budget, known)
        profile, _, seconds = search.best()
        fitting = [s for p, s in points if p <= budget]
        if not fitting:
            assert budget < least
            assert not search.fits(profile)
            continue
        assert profile.peak_bytes <= budget
        assert seconds == pytest.approx(min(fitting), rel=1e-6)
        assert seconds <= last
        last = seconds


def test_the_frontier_is_undominated_and_each_point_is_what_a_full_simulation_says() -> None:
    search = searched(recipe(*PINS[0]), 10**12)
    points = frontier(search, CARD)
    sizes, seconds = [p.peak_bytes for p in points], [p.seconds for p in points]
    assert len(points) > 2
    assert sizes == sorted(set(sizes))
    assert seconds == sorted(set(seconds), reverse=True)
    for point in (points[0], points[len(points) // 2], points[-1]):
        profile = search.full(point.exact, short=True)
        assert profile.phases["train"] == point.peak_bytes
        assert profile.seconds == pytest.approx(point.seconds, rel=1e-6)


def test_a_plan_outside_the_lattice_is_on_the_frontier_and_what_it_beats_is_not() -> None:
    """One that lets things wait elsewhere: drawn beside a curve without it, a plan would beat its own frontier."""
    search = searched(recipe(*PINS[0]), 10**12)
    plain = frontier(search, CARD)
    away = Candidate(
        ExactChoices(1, states="host"), (plain[0].peak_bytes + plain[1].peak_bytes) // 2, plain[1].seconds * 0.999
    )
    points = frontier(search, CARD, beside=[away])
    assert [p for p in points if p.exact == away.exact] == [Point(away.exact, away.peak, away.seconds)]
    assert plain[1] not in points
    assert [p for p in points if p.exact != away.exact] == [plain[0], *plain[2:]]


def test_each_decision_says_what_its_other_value_would_take() -> None:
    search = searched(recipe("exact.in_backward=false"), 10**12)
    chosen = ExactChoices(1, (0, 1), keep="attention")
    decisions = {(d.what, d.instead): d for d in explain(search, chosen, CARD)}
    assert {"recompute", "micro_batch", "loss_chunk", "keep"} == {what for what, _ in decisions}
    more = decisions["micro_batch", "2"]
    assert more.saved_bytes > 0
    assert sentence(more).startswith("micro_batch 1, not 2: saves ")
    nothing = decisions["keep", "nothing"]
    assert nothing.cost_seconds < 0 < -nothing.saved_bytes
    none = search.point(ExactChoices(1), "return", 0)
    mine = search.point(replace(chosen, recompute=()), "return", 2)
    assert decisions["recompute", "0"].saved_bytes == none.peak - mine.peak
    assert decisions["recompute", "0"].cost_seconds == pytest.approx(mine.seconds - none.seconds)


def test_a_step_of_many_micro_batches_counts_its_update_once() -> None:
    described = recipe("train.batch_tokens=2560")
    two, every, three = (
        simulate(described, ExactChoices(n), CONFIG, rates=RATES, steps=1, micro_batches=m).seconds
        for n, m in ((1, 2), (1, None), (1, 3))
    )
    # Simulated as two, all, and three. Adding up the losses, a call for each micro-batch, is not extended.
    assert two == pytest.approx(every, rel=1e-4)
    assert three == pytest.approx(every, rel=1e-4)


def test_a_part_of_a_step_that_adds_up_in_backward_ends_in_its_update() -> None:
    """Two of eight micro-batches stand for all: the same peak, and the update's time is counted."""
    described = recipe("train.batch_tokens=2560", "optimizer={name: galore, rank: 8}", "train.clip=null")
    two, every = (
        simulate(described, ExactChoices(1, in_backward=True), CONFIG, rates=RATES, steps=1, micro_batches=m)
        for m in (2, None)
    )
    assert two.peak.total == every.peak.total
    assert two.seconds == pytest.approx(every.seconds, rel=1e-4)


def test_rates_by_class_of_operator() -> None:
    assert RATES.seconds("aten::mm", "forward", 10**9, 100) == pytest.approx(1e-2 + 1e-6)
    assert RATES.seconds("aten::_scaled_dot_product_flash_attention_for_cpu", "forward", 10**9, 1) > 2e-2
    assert RATES.seconds("aten::add", "forward", 0, 10**9) == pytest.approx(0.05 + 1e-6)
    assert RATES.seconds("aten::softmax", "forward", 0, 10**9) == pytest.approx(0.1 + 1e-6)
    assert replace(RATES, update=1e9).seconds("aten::_fused_adamw_", "optimizer", 0, 10**9) > 0.9
    assert CostMeter(RATES).of_step(4) == (0.0, 0, 0)


@pytest.mark.parametrize("boundary", [1, 2, 3, 7, 8, 9, 63, 64])
def test_the_largest_is_found_with_both_sides_asked(boundary: int) -> None:
    asked: dict[int, bool] = {}

    def measure(value: int) -> tuple[int, bool]:
        asked[value] = value <= 10 * boundary
        return value**2 - (10 * boundary + 9) ** 2, asked[value]

    assert largest(measure, 640, 10) == 10 * boundary
    assert asked[10 * boundary]
    assert boundary == 64 or asked[10 * boundary + 10] is False
    assert len(asked) <= 14


def test_nothing_fits_is_none() -> None:
    assert largest(lambda _: (1, False), 100) is None
    assert largest(lambda _: (0, True), 63, 64) is None
    # What does not fit for another place's sake says nothing in bytes.
    assert largest(lambda value: (-1, value < 77), 100) == 76


@pytest.mark.parametrize(
    "words",
    [["rows=1"], ["seq"], ["seq="], ["seq=0"], ["seq=4..1"], ["seq=1..2..3"], ["seq=-4"], ["seq=1k", "seq=2k"],
     ["batch=1..65"], ["seq=1..9", "batch=1..9"], ["seq=many"], []],
)  # fmt: skip
def test_nonsense_sweeps_are_refused(words: list[str]) -> None:
    with pytest.raises(RecipeError):
        parse(words)


def test_sweeps_are_read() -> None:
    assert parse(["seq=4k,1k", "batch=1..3,8"]) == {"seq": (1024, 4096), "batch": (1, 2, 3, 8)}


def test_a_sweep_marks_lengths_beyond_the_models_positions() -> None:
    from skimp.core.errors import ModelError

    class Fits:
        fits, peak_bytes, seconds = True, 5, 0.1

    def plan(*words: str) -> Any:
        if "2048" in words[0]:
            raise ModelError("data.seq_len 2048", "1024 positions in the model's config")
        return Fits()

    cells = sweep({"seq": (512, 2048)}, 64, 1, plan)
    assert [(c.seq, c.fits, c.why) for c in cells] == [
        (512, True, ""),
        (2048, False, "beyond 1024 positions in the model's config"),
    ]
    with pytest.raises(ModelError):
        sweep({"seq": (2048,)}, 64, 1, plan)


def test_the_picture_has_every_point_and_the_budget() -> None:
    point = {"chosen": {"micro_rows": 1, "recompute": [0]}, "peak_bytes": 10**9, "seconds": 2.0}
    other = {**point, "peak_bytes": 2 * 10**9, "seconds": 1.0}
    plan = {
        "model": "tiny", "frontier": [point, other], "peak_bytes": 10**9, "predicted_step_seconds": 2.0,
        "places": {"device": {"name": "cpu", "budget_bytes": 15 * 10**8}},
    }  # fmt: skip
    drawing = frontier_svg(plan)
    assert drawing.count("<circle") == 3
    assert "budget" in drawing
    assert "GB of the whole process" in drawing
