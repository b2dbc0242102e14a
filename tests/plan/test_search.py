"""What the search promises: pins are kept, a smaller budget never gives a larger run, and what does not fit
is said."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import skimp
from skimp.api import refuse_unless_fits
from skimp.core.errors import DoesNotFit, SkimpError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 2000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
CARD = "24GB"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@cache
def planned(folder: Path, *overrides: str, memory: int | None = None) -> Any:
    """A plan for a card, whose budget is a number of the test and not of this machine; each made once."""
    recipe = {
        "model": {"name": str(folder), "init": "scratch"},
        "output": str(folder / "run"),
        "data": {"train": "pydoc", "seq_len": 256, "validation": None},
        "train": {"steps": 2, "batch_tokens": 1024},
        "eval": None,
        "checkpoint": {"at_end": False},
    }
    return skimp.plan(recipe, *overrides, gpu=CARD, memory=memory)


def test_with_room_nothing_is_spent(folder: Path) -> None:
    plan = planned(folder)
    assert plan.fits
    assert plan.exact.recompute == ()
    assert not plan.exact.in_backward
    assert plan.reservation is not None
    assert plan.profile.peak_bytes < plan.peak_bytes == plan.reservation.reserved <= plan.places.device_budget
    assert plan.seconds > 0


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (("exact.recompute=all", "exact.micro_batch=2"), {"recompute": [0, 1, 2, 3], "micro_rows": 2}),
        (("exact.recompute=2",), {"recompute": [0, 1]}),
        (("exact.recompute=[1, 3]",), {"recompute": [1, 3]}),
        (
            ("exact.recompute=none", "exact.in_backward=true"),
            {"recompute": [], "in_backward": True, "micro_rows": 4},
        ),
        (("exact.loss_chunk=128",), {"loss_chunk": 128}),
        (("exact.in_backward=false",), {"in_backward": False}),
    ],
)
def test_pins_are_kept(folder: Path, pins: tuple[str, ...], expected: dict[str, Any]) -> None:
    chosen = planned(folder, *pins).exact.as_dict()
    assert {key: chosen[key] for key in expected} == expected


def test_pins_that_contradict_each_other_are_refused(folder: Path) -> None:
    with pytest.raises(SkimpError, match="in_backward"):
        planned(folder, "exact.in_backward=true", "exact.micro_batch=1")


def test_smaller_budgets_give_smaller_and_not_faster_runs_until_nothing_fits(folder: Path) -> None:
    plan = planned(folder)
    budget, last = plan.peak_bytes, plan
    seen = 0
    while True:
        plan = planned(folder, memory=budget - 1)
        if not plan.fits:
            break
        assert plan.peak_bytes <= budget - 1 < last.peak_bytes + 1
        assert plan.seconds >= last.seconds
        budget, last, seen = int(0.8 * plan.peak_bytes), plan, seen + 1
        if seen > 8:
            pytest.fail("a sixth of the first budget still fits")
    assert seen >= 2
    # What does not fit names the smallest exact run; that budget does fit.
    smallest = min([plan.peak_bytes, *(a.peak_bytes for a in plan.alternatives if a.exact)])
    assert smallest >= budget
    again = planned(folder, memory=smallest)
    assert again.fits
    assert again.peak_bytes <= smallest


def test_what_does_not_fit_names_the_smallest_and_offers_ways(folder: Path) -> None:
    plan = planned(folder, memory=1_000_000)
    assert not plan.fits
    offers = [a for a in plan.alternatives if not a.exact]
    assert any("optimizer=adamw8bit" in a.overrides for a in offers)
    assert min(a.peak_bytes for a in offers) < plan.peak_bytes
    with pytest.raises(DoesNotFit) as caught:
        refuse_unless_fits(plan)
    message = caught.value.message()
    assert "smallest exact run" in message
    assert "optimizer=adamw8bit" in message


def test_an_offer_reaches_what_it_says(folder: Path) -> None:
    plan = planned(folder, memory=1_000_000)
    offer = next(a for a in plan.alternatives if not a.exact)
    reached = planned(folder, *offer.overrides, memory=offer.peak_bytes)
    assert reached.fits
    assert reached.peak_bytes <= offer.peak_bytes


def test_json_has_the_stable_keys_and_plain_types(folder: Path) -> None:
    for memory in (None, 1_000_000):
        found = json.loads(json.dumps(planned(folder, memory=memory).as_dict()))
        assert {
            "fits",
            "peak_bytes",
            "by_category",
            "chosen",
            "alternatives",
            "places",
            "predicted_step_seconds",
        } <= set(found)
        assert set(found["places"]) == {"device", "host", "disk"}
        assert isinstance(found["fits"], bool)
        assert isinstance(found["peak_bytes"], int)
        assert found["predicted_step_seconds"] > 0
        assert {"micro_rows", "recompute", "loss_chunk", "in_backward"} <= set(found["chosen"])
        assert {"label", "peak_bytes", "seconds", "fits", "exact", "overrides"} <= set(found["alternatives"][0])
        assert all(isinstance(v, int) and v >= 0 for v in found["by_category"].values())


def test_categories_add_up_to_the_peak_on_a_card(folder: Path) -> None:
    plan = planned(folder)
    shares = plan.as_dict()["by_category"]
    assert sum(shares.values()) == plan.peak_bytes
    assert sum(shares.values()) - shares["allocator"] == plan.profile.peak.total


def test_the_plan_is_the_same_twice(folder: Path) -> None:
    found, again = (p.as_dict() for p in (planned(folder), planned.__wrapped__(folder)))
    for both in (found, again):
        del both["places"]["host"], both["places"]["disk"]  # free room here and now
    assert found == again


def test_a_gradient_step_of_the_chosen_run_takes_the_planned_bytes(folder: Path) -> None:
    """Planned for this CPU and run here, with the costliest documents the plan assumes: tracked bytes are
    equal."""
    from skimp.core.memory.tracker import Tracker
    from skimp.data.synthetic import synthetic_batch
    from skimp.plan.simulate import simulate
    from skimp.recipe import load_recipe
    from skimp.run.build import build
    from skimp.run.weights import init_scratch

    plan = planned(folder, "exact.recompute=2", "exact.micro_batch=2")
    recipe = load_recipe(
        {
            "model": {"name": str(folder), "init": "scratch"},
            "output": str(folder / "run"),
            "data": {"train": "pydoc", "seq_len": 256, "validation": None},
            "train": {"steps": 2, "batch_tokens": 1024, "clip": 1e-3},
            "eval": None,
        }
    )
    profile = simulate(recipe, plan.exact, CONFIG)
    run = build(recipe, plan.exact, CONFIG, fill=lambda model: init_scratch(model, 0))
    batch = synthetic_batch(256, 4, 2000, "worst_packed")
    tracker = Tracker()
    tracker.hold((p for _, p in run.parameters()), "weights")
    tracker.hold(run.model.buffers(), "weights")
    tracker.hold(
        (v for s in run.optimizer.state.values() for v in s.values() if hasattr(v, "untyped_storage")),
        "optimizer",
    )
    tracker.hold(batch.tensors(), "batch")
    with tracker:
        for _ in range(2):
            run.step(batch)
    assert tracker.peak.total == profile.phases["train"]
    assert tracker.peak.by_category == profile.peak.by_category
