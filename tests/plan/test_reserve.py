"""On a card the plan's peak is what PyTorch reserves for the very step, and that is what must fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_extend import CONFIGS, ROWS, SEQ, recipe

from skimp.core.exact import ExactChoices
from skimp.core.memory.cuda_settings import MIB, AllocatorSettings
from skimp.plan.make import make_plan
from skimp.plan.places import Places
from skimp.plan.reserve import reserve, trace_of
from skimp.plan.simulate import simulate
from skimp.recipe import resolve_gpu

CARD = resolve_gpu("t4").card
WIDE = {**CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3}


def card(budget: int) -> Places:
    return Places("t4", budget, 10**10, 10**10, 0, ("a test",), CARD)


@pytest.mark.parametrize("recomputed", [0, 3])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_trace_asks_for_what_the_profile_counts(recomputed: int, in_backward: bool) -> None:
    described = recipe("train.clip=null")
    exact = ExactChoices(ROWS, tuple(range(recomputed)), None, in_backward)
    config = {**CONFIGS["llama"], "num_hidden_layers": 3}
    profile = simulate(described, exact, config, target="cuda", steps=1, short=True, evaluate=True)
    none = replace(card(10**10), card=replace(CARD, workspace_bytes=0))
    assert reserve(described, config, exact, none).requested == profile.phases["train"]
    assert reserve(described, config, exact, card(10**10)).requested == profile.phases["train"] + 2 * 8320 * 1024


def test_a_step_leaves_what_it_found() -> None:
    """Nothing is made in a step and left, so that the trace may be repeated."""
    described, config = recipe(), {**CONFIGS["gpt2"], "n_layer": 2}
    trace = trace_of(described, config, ExactChoices(1), card(10**10))
    live: set[int] = set()
    for key, size in zip(trace.keys[trace.step :], trace.sizes[trace.step :], strict=True):
        live.add(key) if size > 0 else live.discard(key)
    assert {key for key in live if key >= 0} == set()
    assert len(live) == 2  # the workspaces of two handles


def test_the_plan_for_a_card_is_what_it_reserves() -> None:
    plan = make_plan(recipe(), WIDE, where=card(200 * MIB))
    assert plan.fits
    found = plan.reservation
    assert found is not None
    assert plan.profile.peak.total < found.requested <= found.allocated <= found.reserved == plan.peak_bytes
    assert plan.peak_bytes % (2 * MIB) == 0
    said = plan.as_dict()
    assert said["places"]["device"]["allocator"]["reserved_bytes"] == plan.peak_bytes
    assert sum(said["by_category"].values()) == plan.peak_bytes
    assert any("8.52 MB of workspace" in note and "400 MB of context" in note for note in plan.notes)


def test_bytes_in_pieces_count_against_the_budget() -> None:
    """A budget that holds the tensors and not the segments makes the search go on, to a run whose segments fit."""
    loose = make_plan(recipe(), WIDE, where=card(10**9))
    assert loose.reservation is not None
    budget = loose.reservation.allocated
    tight = make_plan(recipe(), WIDE, where=card(budget), offer=False)
    assert tight.reservation is not None
    if tight.fits:
        assert tight.reservation.reserved <= budget
        assert tight.exact != loose.exact or tight.reservation.retries > 0
    else:
        assert not tight.reservation.fits or tight.peak_bytes > budget
    nothing = make_plan(recipe(), WIDE, where=card(30 * MIB), offer=False)
    assert not nothing.fits
    assert nothing.reservation is not None
    assert not nothing.reservation.fits


def test_settings_of_the_environment_are_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    plan = make_plan(recipe(), WIDE, where=card(10**9), offer=False)
    assert any("allocator (expandable_segments:True)" in note for note in plan.notes)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    exact = plan.exact
    there = reserve(recipe(), WIDE, exact, card(10**9), AllocatorSettings(expandable=True))
    assert there == plan.reservation


def test_more_rows_and_longer_rows_never_reserve_less() -> None:
    """Point 4 of what a simulation must show, for reserved bytes."""

    def reserved(rows: int, seq: int) -> int:
        described: Any = recipe(f"data.seq_len={seq}", f"train.batch_tokens={rows * seq}")
        return reserve(described, WIDE, ExactChoices(rows), card(10**10)).reserved

    assert reserved(1, 64) <= reserved(2, 64) <= reserved(4, 64) < reserved(16, 64)
    assert reserved(2, SEQ) <= reserved(2, 128) <= reserved(2, 512)
