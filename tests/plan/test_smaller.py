"""The next smaller plan of a run under way: fewer bytes of tensors, the same mathematics, pins kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skimp.plan.make import make_plan
from skimp.plan.plan import Plan
from skimp.plan.smaller import LEAST_SHARE, MOST_SHARE, with_less_disk, with_less_room, with_more_overhead
from skimp.recipe import load_recipe

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {
        "model": "x", "data": {"train": "pydoc", "seq_len": 256}, "output": "o",
        "train": {"batch_tokens": 16 * 256}, "eval": None,
        "exact": {"in_backward": False, "loss_chunk": 64, "offload": {"optimizer": "none", "activations": "none"}},
    }  # fmt: skip
    return load_recipe(values, overrides)


@pytest.fixture(scope="module")
def large() -> Plan:
    return make_plan(recipe(), CONFIG, memory=10**11, offer=False)


def train_peak(plan: Plan) -> int:
    return plan.profile.phases["train"]


@pytest.mark.parametrize("share", [0.99, 0.8, 0.0])
def test_less_room_is_the_share_that_was_reached(share: float, large: Plan) -> None:
    own = large.places.baseline
    held = own + int(share * (large.peak_bytes - own))
    found = with_less_room(large, recipe(), CONFIG, held, 0)
    assert found is not None
    assert train_peak(found) <= min(MOST_SHARE, max(LEAST_SHARE, share)) * train_peak(large)
    assert found.rows == large.rows == 16
    assert found.exact.loss_chunk == 64
    assert not found.exact.in_backward


def test_what_was_refused_counts_where_little_was_held_yet(large: Plan) -> None:
    """A tenth of all tensors refused at the start of a step: nine tenths may still be there to plan for."""
    own = large.places.baseline
    found = with_less_room(large, recipe(), CONFIG, own, train_peak(large) // 10)
    least = with_less_room(large, recipe(), CONFIG, own, 0)
    assert found is not None
    assert least is not None
    assert train_peak(least) < train_peak(found) <= 0.9 * train_peak(large)


def test_it_ends_at_the_smallest(large: Plan) -> None:
    plan, seen = large, [train_peak(large)]
    while (found := with_less_room(plan, recipe(), CONFIG, plan.places.baseline, 0)) is not None:
        seen.append(train_peak(found))
        plan = found
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == len(seen)
    assert plan.exact.micro_rows == 1
    assert len(plan.exact.recompute) == 4


def test_pins_stay_and_leave_nothing_smaller() -> None:
    kept_here = ("exact.offload.activations=none", "exact.offload.optimizer=none")
    pinned = recipe(
        "exact.micro_batch=16", "exact.recompute=2", "exact.keep=nothing", "exact.mlp_chunk=1024", *kept_here
    )
    plan = make_plan(pinned, CONFIG, memory=10**11, offer=False)
    assert with_less_room(plan, pinned, CONFIG, plan.places.baseline, 0) is None
    assert with_more_overhead(plan, pinned, CONFIG, 2 * 10**11) is None
    half = recipe("exact.micro_batch=16")
    found = with_less_room(make_plan(half, CONFIG, memory=10**11, offer=False), half, CONFIG, 0, 0)
    assert found is not None
    assert found.exact.micro_rows == 16
    assert found.exact.recompute


def test_overhead_that_was_seen_is_planned_for_in_the_same_budget(large: Plan) -> None:
    # In the places of the first plan: a baseline measured again is never the same.
    budget, more = large.peak_bytes + 1_000_000, 5_000_000
    plan = make_plan(recipe(), CONFIG, offer=False, where=replace(large.places, device_budget=budget))
    assert plan.exact == large.exact
    found = with_more_overhead(plan, recipe(), CONFIG, plan.peak_bytes + more)
    assert found is not None
    assert found.fits
    assert found.places.device_budget == plan.places.device_budget
    assert found.places.baseline == plan.places.baseline + more
    assert found.peak_bytes <= budget
    assert with_more_overhead(plan, recipe(), CONFIG, 3 * budget) is None


@pytest.fixture(scope="module")
def away(large: Plan) -> Plan:
    """What all blocks keep of 16 rows at once is on disk."""
    asked = recipe("exact.micro_batch=16", "exact.offload.activations=disk", "exact.offload.blocks=all")
    plan = make_plan(asked, CONFIG, offer=False, where=large.places)
    assert plan.exact.offload == (0, 1, 2, 3)
    assert not plan.exact.recompute
    return plan


@pytest.mark.parametrize("pinned", ["exact.offload.activations=disk", "exact.offload.optimizer=none"])
@pytest.mark.parametrize("full", [True, False])
def test_a_disk_that_failed_is_done_without_also_where_it_was_pinned(pinned: str, full: bool, away: Plan) -> None:
    room = away.profile.away["disk"] if full else 0
    found = with_less_disk(away, recipe("exact.micro_batch=16", pinned), CONFIG, room)
    assert found is not None
    assert found.fits
    assert not found.exact.offload
    assert found.exact.micro_rows == 16


def test_a_full_disk_still_holds_what_it_held_where_the_budget_needs_it(away: Plan) -> None:
    """The smallest plan with nothing there does not fit; one with the blocks' inputs there does, in fewer bytes."""
    config, none = {**CONFIG, "num_hidden_layers": 10}, replace(away.places, device_budget=1)
    rest = ("exact.micro_batch=16", "exact.keep=nothing", "exact.mlp_chunk=1024")
    least = make_plan(recipe(*rest), config, offer=False, where=none)
    with_inputs = recipe(*rest, "exact.recompute=all", "exact.offload.activations=disk")
    less = make_plan(with_inputs, config, offer=False, where=none)
    assert less.peak_bytes < least.peak_bytes
    tight = replace(away, places=replace(away.places, device_budget=less.peak_bytes), blocks=10)
    free = recipe(*rest, "exact.offload.activations=disk", "exact.offload.optimizer=none")
    room = less.profile.away["disk"]
    found = with_less_disk(tight, free, config, room)
    assert found is not None
    assert found.exact.offload
    assert found.exact.recompute == tuple(range(10))
    assert found.profile.away["disk"] <= room < away.profile.away["disk"]
    assert with_less_disk(tight, free, config, room - 1) is None
    assert with_less_disk(tight, free, config, 0) is None
