"""Whole sessions whose int8 weights train: refused or planned before, resumed to the bit, evaluated and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged

import skimp
from skimp.core.codecs import Int8
from skimp.core.coded_linear import coded_layers
from skimp.core.coded_trained import decoded
from skimp.core.errors import EffectError, RecipeError
from skimp.core.exact import ExactChoices
from skimp.core.gradients import InBackward
from skimp.data.synthetic import synthetic_batch
from skimp.export.merged import export_merged
from skimp.optim import codes
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe, resolve_model
from skimp.run.build import build
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.effect import Effect
from skimp.run.found import find
from skimp.run.opened import open_model
from skimp.run.weights import load_weights

pytestmark = pytest.mark.usefixtures("plan_once")

RULE = {"name": "q-galore", "rank": 8, "refresh": 2}


def described(recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {"name": recipe["model"], "weights": {"name": "int8", "group": 16}}
    return merged({**recipe, "model": model, "optimizer": RULE}, changes)


def start(recipe: dict[str, Any], voice: Any = None, resume: bool = False, **changes: Any) -> Any:
    return skimp.train(described(recipe, **changes), resume=resume, voice=voice)


def test_resumed_to_the_bit_evaluated_and_exported(recipe: dict[str, Any], tmp_path: Path) -> None:
    voice = Heard()
    whole = start(recipe, voice, output=str(tmp_path / "whole"))
    assert any("trained in codes: 14 linear layers in int8" in line for line in voice.said)
    start(recipe, Heard(stop_at=3))
    outcome = start(recipe, resume=True)
    losses = [step["loss"] for step in lines(outcome.folder / "metrics.jsonl")]
    assert losses == [step["loss"] for step in lines(whole.folder / "metrics.jsonl")]
    assert losses[-1] < losses[0]

    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        names = expected.names("model")
        assert sum(name.endswith("weight_codes") for name in names) == 14
        assert not any(name.endswith("proj.weight") for name in names)
        for group in ("model", "optimizer"):
            for name in expected.names(group):
                assert torch.equal(found.read(group, name), expected.read(group, name)), name
        name = "model.layers.1.mlp.down_proj"
        parts = {key: found.read("model", f"{name}.weight_{key}") for key in ("codes", "scale")}

    opened = open_model(find(str(outcome.folder)))
    seen = opened.model.get_parameter(f"{name}.weight")
    assert torch.equal(seen, Int8(16).decode(parts, seen.shape, torch.float32))
    ids, positions = torch.arange(1, 20).unsqueeze(0), torch.arange(19).unsqueeze(0)
    with torch.no_grad():
        ours = opened.head.logits_of(ids, positions)
    export_merged(find(str(outcome.folder)), tmp_path / "merged")
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(theirs.get_parameter(f"{name}.weight"), seen)
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_the_plan_and_the_run_hold_a_byte_a_weight(recipe: dict[str, Any]) -> None:
    """Resting weights: embedding and norms as they are, 1 byte a weight of the blocks and 4 for every 16 of them."""
    asked = load_recipe(described(recipe))
    source = resolve_model(asked.model)
    exact = ExactChoices(4, (), 64, True)
    profile = simulate(asked, exact, source.config)
    run = build(asked, exact, source.config, fill=lambda model: load_weights(model, source.weights))
    numbers = sum(module.weight.numel() for _, module in coded_layers(run.model))
    whole = sum(p.nbytes for p in run.model.parameters())
    beside = sum(b.nbytes for n, b in run.model.named_buffers() if "weight_" not in n)
    assert profile.resting["weights"] == whole + beside + numbers + 4 * numbers // 16
    plain = simulate(load_recipe(described(recipe, **{"model.weights": None})), exact, source.config)
    assert plain.resting["weights"] - profile.resting["weights"] == 3 * numbers - 4 * numbers // 16
    assert profile.parameters == plain.parameters
    assert profile.kept_bytes < plain.kept_bytes
    assert profile.phases["train"] < plain.phases["train"]
    run.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adamw"}, r"model\.weights[\s\S]*optimizer adamw[\s\S]*optimizer=q-galore[\s\S]*adapter=lora"),
        ({"optimizer": "galore"}, r"model\.weights[\s\S]*optimizer galore[\s\S]*optimizer=q-galore"),
        ({"model.weights": "nf4"}, r"model\.weights[\s\S]*nf4[\s\S]*model\.weights=int8, which q-galore trains"),
        ({"model.weights": "int4"}, r"model\.weights[\s\S]*int4[\s\S]*model\.weights=int8"),
    ],
)
def test_what_cannot_train_codes_is_refused_with_what_can(
    recipe: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe(described(recipe, **changes))


def test_layers_that_train_in_turn_are_refused(recipe: dict[str, Any]) -> None:
    asked = load_recipe(described(recipe, **{"train.layers": "lisa"}))
    with pytest.raises(skimp.core.errors.ConflictError, match="int8"):
        simulate(asked, ExactChoices(4), resolve_model(asked.model).config)


def test_with_an_adapter_the_codes_stay_frozen(recipe: dict[str, Any]) -> None:
    asked = load_recipe(described(recipe, adapter="lora"))
    source = resolve_model(asked.model)
    run = build(asked, ExactChoices(4), source.config, fill=lambda model: load_weights(model, source.weights))
    assert all(module.trained is None for _, module in coded_layers(run.model))
    assert all("lora" in name for name in run.delivery.parameters)


def test_a_rule_that_does_not_put_the_codes_back_is_found_out(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = load_recipe(described(recipe, **{"train.lr": 0.1}))
    source = resolve_model(asked.model)
    run = build(asked, ExactChoices(4, (), 64, True), source.config, fill=lambda m: load_weights(m, source.weights))
    assert isinstance(run.delivery, InBackward)
    monkeypatch.setattr(codes, "put", lambda *args: None)
    effect = Effect(run)
    run.set_lr(0.1)
    run.step(synthetic_batch(32, 4, 320, None, 0))
    with pytest.raises(EffectError, match="moves weights kept in codes"):
        effect.check(run, 0.1)


def test_a_living_run_is_rebuilt_and_goes_back(recipe: dict[str, Any]) -> None:
    """Another delivery between two steps: the coming ones are those of a run built that way."""
    asked = load_recipe(described(recipe, **{"train.clip": None, "optimizer.compact": True}))
    source = resolve_model(asked.model)

    def made(exact: ExactChoices) -> Any:
        return build(asked, exact, source.config, fill=lambda model: load_weights(model, source.weights))

    one, two = made(ExactChoices(4, (), 64)), made(ExactChoices(4, (0,), 64, True))
    batches = [synthetic_batch(32, 4, 320, None, seed) for seed in range(4)]
    for run in (one, two):
        for batch in batches[:2]:
            run.step(batch)
    one.rebuild(two.exact)
    for batch in batches[2:]:
        assert one.step(batch).loss == two.step(batch).loss
    for (_, a), (_, b) in zip(coded_layers(one.model), coded_layers(two.model), strict=True):
        assert torch.equal(decoded(a), decoded(b))
