"""Plans that let things wait elsewhere: extended = simulated, only where needed, pins kept, every place a budget."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.api import refuse_unless_fits
from skimp.core import disk
from skimp.core.errors import DoesNotFit, RecipeError
from skimp.core.exact import ExactChoices
from skimp.plan import transfers
from skimp.plan.cost import Rates
from skimp.plan.make import make_plan
from skimp.plan.offloading import OffloadingSearch
from skimp.plan.places import Places
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

BLOCKS = 11
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
RATES = Rates(1e11, 1e10, "test")


def recipe(*overrides: str, rows: int = 2, seq: int = 128, output: Path | str = "runs/offload") -> Any:
    values = {
        "model": "tiny",
        "data": {"train": "pydoc", "seq_len": seq, "validation": None},
        "output": str(output),
        "train": {"steps": 2, "batch_tokens": rows * seq, "clip": 1.0},
        "eval": None,
    }
    return load_recipe(values, list(overrides))


def search(budget: int, *overrides: str, target: str = "cpu", **shape: Any) -> OffloadingSearch:
    return OffloadingSearch(recipe(*overrides, **shape), CONFIG, BLOCKS, {"return": (budget, 1.0)}, RATES, target)


def places(budget: int, disk: int = 10**12, **more: Any) -> Places:
    return Places("cpu", budget, budget, disk, 0, (), **more)


@pytest.mark.parametrize(
    ("target", "again", "states"), [("cpu", False, "device"), ("cpu", True, "disk"), ("cuda", False, "disk")]
)
def test_blocks_away_extend_to_what_the_whole_model_takes(target: str, again: bool, states: Any) -> None:
    found = search(0, target=target)
    made = ExactChoices(1, tuple(range(BLOCKS)) if again else (), states=states)
    depths = found._simulated_depths(made)
    for away in (4, 7, BLOCKS - 1, BLOCKS):
        exact = replace(made, offload=tuple(range(away)))
        full = simulate(found.recipe, exact, CONFIG, rates=RATES, target=target, steps=1, micro_batches=2, short=True)
        assert depths.peak(away, BLOCKS - away) == full.phases["train"]
        assert depths.seconds.at(away, BLOCKS - away) == pytest.approx(full.seconds, rel=1e-6)


def test_nothing_waits_elsewhere_while_something_fits_without() -> None:
    roomy = search(10**10)
    assert not any(c.exact.offload or c.exact.states != "device" for c in roomy.candidates())


@pytest.mark.slow
def test_the_plan_goes_as_far_as_it_must() -> None:
    """Less and less room: recompute, then states on disk, then the recomputed blocks' inputs as well, then nothing."""
    # Long rows: training stands above the 8 MiB that saving stages through.
    every = tuple(range(BLOCKS))
    least = {}
    fixed: dict[str, Any] = {"in_backward": True, "loss_chunk": 64, "mlp_chunk": 1024}
    for name, exact in {
        "plain": ExactChoices(2, every, **fixed),
        "states": ExactChoices(2, every, **fixed, states="disk"),
        "both": ExactChoices(2, every, **fixed, states="disk", offload=every),
    }.items():
        least[name] = simulate(recipe(seq=1024), exact, CONFIG, steps=1, evaluate=False).peak_bytes
    assert least["plain"] > least["states"] > least["both"]
    found = {}
    for name, budget in {**least, "none": least["both"] // 2}.items():
        profile, _, _ = search(int(1.01 * budget), seq=1024).best()
        found[name] = profile.exact
        assert (profile.peak_bytes <= int(1.01 * budget)) == (name != "none")
    assert found["plain"].states == "device"
    assert not found["plain"].offload
    assert found["states"].states == "disk"
    assert found["both"].states == "disk"
    assert found["both"].offload


def test_what_cannot_wait_elsewhere_is_not_tried() -> None:
    """Adafactor's states are no place's worth: its facts say so, and a plan must not run into them."""
    asked = recipe("optimizer=adafactor")
    found = OffloadingSearch(asked, CONFIG, BLOCKS, {"return": (1, 1.0)}, RATES, "cpu")
    assert found.homes == [None]
    assert found.places == [None, "disk"]


def test_pins_are_kept(tmp_path: Path) -> None:
    asked = recipe("exact.offload={activations: disk, blocks: [1, 3], optimizer: none}", output=tmp_path)
    plan = make_plan(asked, CONFIG, where=places(10**9, near=str(tmp_path)))
    assert plan.exact.offload == (1, 3)
    assert plan.exact.states == "device"
    assert plan.profile.away["disk"] > 0
    asked = recipe("exact.offload={optimizer: disk, activations: none}", output=tmp_path)
    plan = make_plan(asked, CONFIG, where=places(10**9, near=str(tmp_path)))
    assert plan.exact.offload == ()
    assert plan.exact.states == "disk"
    asked = recipe("exact.offload={optimizer: none, activations: none}", output=tmp_path)
    plan = make_plan(asked, CONFIG, where=places(10**6, near=str(tmp_path)), offer=False)
    assert not plan.fits
    assert plan.exact.offload == ()
    assert plan.exact.states == "device"


def test_a_plan_says_what_waits_where_and_what_to_type(tmp_path: Path) -> None:
    asked = recipe("exact.offload={activations: disk, optimizer: disk}", output=tmp_path)
    plan = make_plan(asked, CONFIG, where=places(10**9, near=str(tmp_path)))
    assert any("wait on disk" in reason for reason in plan.why)
    assert any("optimizer states live on disk" in reason for reason in plan.why)
    found = plan.as_dict()
    assert found["chosen"]["states"] == "disk"
    assert ExactChoices.from_dict(found["chosen"]) == plan.exact
    assert found["places"]["disk"]["peak_bytes"] == plan.disk_bytes >= plan.profile.away["disk"]
    again = recipe(*[o for a in plan.alternatives for o in a.overrides if o.startswith("exact.offload")][:3])
    assert again.exact.offload.optimizer in ("disk", None)


def test_the_disk_is_a_budget_too(tmp_path: Path) -> None:
    asked = recipe("exact.offload={activations: disk, optimizer: disk}", output=tmp_path)
    roomy = make_plan(asked, CONFIG, where=places(10**9, near=str(tmp_path)))
    assert roomy.fits
    tight = places(10**9, roomy.disk_bytes - 1, near=str(tmp_path))
    plan = make_plan(asked, CONFIG, where=tight, offer=False)
    assert not plan.fits
    with pytest.raises(DoesNotFit, match="what is offloaded"):
        refuse_unless_fits(plan)
    with_text = make_plan(asked, CONFIG, where=replace(tight, disk=roomy.disk_bytes, text_bytes=1), offer=False)
    assert not with_text.fits


def test_checkpoints_are_counted_with_the_states_that_live_elsewhere() -> None:
    here = simulate(recipe(), ExactChoices(2), CONFIG, steps=1)
    away = simulate(recipe(), ExactChoices(2, states="disk"), CONFIG, steps=1)
    assert away.kept_bytes == here.kept_bytes
    assert away.resting.get("optimizer", 0) < 0.1 * here.resting["optimizer"]
    assert away.phases["resume"] < here.phases["resume"]
    assert away.phases["save"] > sum(away.resting.values())


def test_beside_a_card_the_host_is_planned_and_is_a_budget() -> None:
    exact = ExactChoices(2, offload=tuple(range(BLOCKS)), offload_to="host", states="host")
    profile = simulate(recipe("device=24GB"), exact, CONFIG, target="cuda", steps=1)
    parameters = 4 * profile.parameters
    assert profile.away["host"] > 3 * parameters  # m, v and a copy of each parameter, and activations
    assert "disk" not in profile.away
    assert profile.resting.get("optimizer", 0) < 0.1 * parameters


def test_host_memory_is_no_place_to_wait_for_a_run_on_the_cpu() -> None:
    with pytest.raises(RecipeError, match="computes in host memory"):
        recipe("exact.offload={activations: host}")
    with pytest.raises(RecipeError, match="nowhere to put"):
        recipe("exact.offload={blocks: 3}")
    with pytest.raises(RecipeError, match="at least one block"):
        recipe("exact.offload={activations: disk, blocks: 0}")


def test_a_cards_copies_pass_beside_the_computation_and_a_cpus_do_not(tmp_path: Path) -> None:
    out = back = 10**9
    compute = 3.0
    on_card = transfers.seconds({"host": (out, back)}, "", compute)
    assert on_card == 0.0
    assert transfers.seconds({"host": (out, back)}, "", 0.0) == pytest.approx(2e9 / transfers.CARD_HOST)
    road = transfers.way("disk", str(tmp_path))
    assert not road.beside
    assert road.source.startswith(f"measured in {tmp_path}: ")
    assert f"{road.out / 1e6:,.0f} MB/s out, {road.back / 1e6:,.0f} MB/s back" in road.source
    assert "a slow disk" in transfers.measured_way("x", 90e6, 800e6).source
    assert "slow" not in transfers.measured_way("x", 900e6, 800e6).source
    assert transfers.seconds({"disk": (out, back)}, str(tmp_path), compute) == pytest.approx(
        out / road.out + back / road.back
    )


def test_a_folder_that_cannot_be_tried_is_assumed_slow(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder", encoding="utf-8")
    assert transfers.way("disk", str(file)).out == transfers.UNKNOWN_DISK


def test_a_disk_too_full_for_the_trial_is_planned_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _size: int, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr(disk, "allocate", full)
    found = transfers.way("disk", str(tmp_path))
    assert found.out == found.back == transfers.UNKNOWN_DISK
    assert "cannot be tried" in found.source
