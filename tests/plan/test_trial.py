"""`--probe`: two real steps of a plan, measured in a process of their own, and remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_extend import CONFIGS

from skimp.core.errors import DoesNotFit, RecipeError, SkimpError
from skimp.core.exact import ExactChoices
from skimp.plan import history
from skimp.plan import trial as trials
from skimp.plan.places import Places
from skimp.plan.plan import Plan
from skimp.plan.simulate import simulate
from skimp.plan.slack import Shape, beside
from skimp.plan.trial import trial
from skimp.recipe import load_recipe

CONFIG = {**CONFIGS["llama"], "num_hidden_layers": 2}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Plan]:
    """A small recipe with a plan made of its simulation; the log is this test's own."""
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(
        {"model": "x", "data": {"train": "pydoc", "seq_len": 32}, "output": str(tmp_path / "o"), "eval": None,
         "train": {"batch_tokens": 64, "steps": 1}}, []
    )  # fmt: skip
    exact = ExactChoices(1, (1,), offload=(0,), states="disk")
    profile = simulate(recipe, exact, CONFIG)
    where = Places("cpu", 4 * 10**9, 4 * 10**9, 10**12, 400_000_000, (), available=4 * 10**9, near=str(tmp_path))
    peak = where.baseline + beside(profile.peak_bytes, "return", Shape())
    return recipe, Plan(True, exact, profile, where, peak, 0.5, (), (), 0, "tiny", 2, 2)


def test_two_real_steps_hold_the_simulated_bytes_and_are_remembered(planned: tuple[Any, Plan]) -> None:
    recipe, plan = planned
    found = trial(recipe, CONFIG, plan)
    assert found.tensors == plan.profile.phases["train"]
    assert found.baseline > 100_000_000
    assert found.process > found.baseline
    assert found.seconds > 0
    assert found.expected - found.baseline == plan.peak_bytes - plan.places.baseline
    assert found.above == max(0, found.process - found.expected)
    assert not Path(recipe.output).exists(), "the run itself would take the folder for somebody else's"
    (row,) = history.read()
    assert row["kind"] == "probe"
    assert row["measured"]["process"] == found.process
    assert row["planned"]["process"] == found.expected
    assert row["recipe"] == history.digest(recipe)


def test_what_does_not_fit_and_what_is_for_a_card_takes_no_step(
    planned: tuple[Any, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(trials, "_child", never)
    recipe, plan = planned
    with pytest.raises(DoesNotFit):
        trial(recipe, CONFIG, replace(plan, fits=False))
    with pytest.raises(DoesNotFit, match="takes"):
        trial(recipe, CONFIG, replace(plan, places=replace(plan.places, available=plan.peak_bytes - 1)))
    with pytest.raises(RecipeError, match="rtx"):
        trial(recipe, CONFIG, replace(plan, places=replace(plan.places, device="rtx-4090")))
    assert history.read() == []


def test_steps_that_fail_are_an_error_with_the_childs_last_words(planned: tuple[Any, Plan]) -> None:
    recipe, plan = planned
    with pytest.raises(SkimpError, match="vocab_size"):
        trial(recipe, {k: v for k, v in CONFIG.items() if k != "vocab_size"}, plan)
    with pytest.raises(SkimpError, match="no answer within"):
        trial(recipe, CONFIG, plan, patience=0.01)
    assert history.read() == []
