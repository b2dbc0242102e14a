"""Plans of layer-sampled training: they fit what they were asked for, and hold for every draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skimp.plan.adapted import for_few_blocks
from skimp.plan.make import make_plan
from skimp.plan.places import places
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 256,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {
        "model": "x", "data": {"train": "pydoc", "seq_len": 64}, "output": "o",
        "train": {"batch_tokens": 2 * 64}, "eval": None, "checkpoint": {"every": None, "at_end": True},
    }  # fmt: skip
    return load_recipe(values, overrides)


def test_small_simulations_train_one_block() -> None:
    asked = recipe("train.layers={active: 3}")
    few = for_few_blocks(asked, CONFIG)
    assert few.train.layers.active == 1
    assert few.train.layers.every == asked.train.layers.every
    assert for_few_blocks(asked, CONFIG, 2).train.layers.active == 2


@pytest.mark.parametrize("name", ["lisa", "badam"])
def test_the_plan_is_the_simulation_of_the_costliest_blocks(name: str) -> None:
    asked = recipe(f"train.layers={{name: {name}, active: 2}}", "exact.in_backward=false")
    plan = make_plan(asked, CONFIG, memory=10**10)
    assert plan.profile.peak_bytes == simulate(asked, plan.exact, CONFIG).peak_bytes
    full = make_plan(recipe("exact.in_backward=false"), CONFIG, memory=10**10)
    # Two of six blocks: gradients and moments of four are not there.
    block = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64)
    assert full.profile.resting["optimizer"] - plan.profile.resting["optimizer"] >= 4 * 2 * block
    assert full.profile.peak_bytes - plan.profile.peak_bytes >= 4 * 2 * block
    assert full.disk_bytes - plan.disk_bytes >= 4 * 2 * block
    assert any("the costliest 2 are simulated" in note for note in plan.notes)


def test_what_fits_nowhere_is_not_moved_to_disk_and_no_adapter_is_offered() -> None:
    """The registry refuses both beside it, so a plan must neither choose nor simulate them."""
    asked = recipe("train.layers={active: 3}")
    where = places(asked, CONFIG, None, None)
    none = make_plan(asked, CONFIG, where=replace(where, device_budget=where.baseline + 10_000))
    assert not none.fits
    assert none.exact.states == "device"
    assert not any("adapter" in o for a in none.alternatives for o in a.overrides)
    assert all(a.exact or a.peak_bytes > 0 for a in none.alternatives)
