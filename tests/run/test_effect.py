"""A technique that did nothing fails the run, by name: each is disabled in turn, and its check must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from session_cases import merged

from skimp.core.errors import EffectError
from skimp.core.exact import ExactChoices
from skimp.core.gradients import AfterBackward
from skimp.core.registry import load
from skimp.data.synthetic import synthetic_batch
from skimp.recipe import load_recipe
from skimp.run import stepping
from skimp.run.build import Run, build
from skimp.run.effect import Effect, _sample
from skimp.run.weights import init_scratch

CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
LR = 1e-3
HELD = ExactChoices(2, (0,))
IN_BACKWARD = ExactChoices(4, (), None, True)


def make(recipe: dict[str, Any], exact: ExactChoices, **changes: Any) -> Run:
    described = load_recipe(merged(recipe, changes))
    return build(described, exact, CONFIG, fill=lambda model: init_scratch(model, 0))


def checked(run: Run) -> None:
    run.set_lr(LR)
    effect = Effect(run)
    run.step(synthetic_batch(32, 4, 320, seed=0))
    effect.check(run, LR)


SOUND: dict[str, tuple[ExactChoices, dict[str, Any]]] = {
    "recompute and accumulation": (HELD, {}),
    "in backward": (IN_BACKWARD, {}),
    "in backward, unclipped": (IN_BACKWARD, {"train.clip": None}),
    "8-bit": (HELD, {"optimizer": "adamw8bit"}),
    "bf16": (HELD, {"precision": "bf16"}),
    "bf16, 8-bit, in backward": (IN_BACKWARD, {"precision": "bf16", "optimizer": "adamw8bit"}),
    "bf16-mixed": (HELD, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_works_passes(case: str, recipe: dict[str, Any]) -> None:
    exact, changes = SOUND[case]
    checked(make(recipe, exact, **changes))


def disabled(patch: pytest.MonkeyPatch, run: Run) -> dict[str, Callable[[], None]]:
    """How each technique is switched off behind its own back."""

    def no_recompute() -> None:
        run.recompute.remove()

    def micro_batches_whole() -> None:
        patch.setattr(Run, "step", lambda self, batch: self.stepper.step([batch]))

    def no_update() -> None:
        patch.setattr(run.optimizer, "step_parameter", lambda parameter, grad=None: None)

    def kept_gradients() -> None:
        plain = run.delivery.end

        def end(index: int) -> Any:
            kept = {n: p.grad for n, p in run.delivery.parameters.items()}
            done = plain(index)
            for name, parameter in run.delivery.parameters.items():
                parameter.grad = kept[name]
            return done

        patch.setattr(run.delivery, "end", end)

    def full_states() -> None:
        for state in run.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                    state[key] = value.float()
        patch.setattr(run.optimizer, "step_parameter", lambda parameter, grad=None: None)

    return {
        "recompute": no_recompute,
        "micro-batches": micro_batches_whole,
        "moves the parameters": no_update,
        "gradients freed": kept_gradients,
        "bytes of state": full_states,
    }


@pytest.mark.parametrize(
    "what", ["recompute", "micro-batches", "moves the parameters", "gradients freed", "bytes of state"]
)
def test_what_is_disabled_is_named(what: str, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    eight = {"optimizer": "adamw8bit"} if what == "bytes of state" else {}
    run = make(recipe, HELD, **eight)
    disabled(monkeypatch, run)[what]()
    names = {"moves the parameters": "moves the parameters|updates parameters"}
    with pytest.raises(EffectError, match=names.get(what, what)):
        checked(run)


def test_gradients_that_outlive_backward_are_named(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "InBackward", AfterBackward)
    run = make(recipe, IN_BACKWARD)
    with pytest.raises(EffectError, match=r"stepping in backward\n.*gradients were held until it had ended"):
        checked(run)


def test_most_parameters_must_move_not_just_one(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(recipe, HELD)
    plain = run.optimizer.step_parameter

    def only_norms(parameter: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        plain(parameter, grad if parameter.dim() == 1 else torch.zeros_like(parameter))

    monkeypatch.setattr(run.optimizer, "step_parameter", only_norms)
    with pytest.raises(EffectError, match=r"\d+ of \d+ did not move"):
        checked(run)


def test_bf16_updates_that_are_rounded_away_are_named(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """4e-5 is a third of the distance of bfloat16 numbers near 0.02: rounded to nearest, it is lost."""
    run = make(recipe, HELD, precision="bf16")
    lr = 4e-5

    def nearest(parameter: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        state = run.optimizer.init_state(parameter)
        state["step"] += 1

    monkeypatch.setattr(run.optimizer, "step_parameter", nearest)
    run.set_lr(lr)
    effect = Effect(run)
    run.step(synthetic_batch(32, 4, 320, seed=0))
    with pytest.raises(EffectError, match=r"none of \d+ bfloat16 parameters moved"):
        effect.check(run, lr)


def test_rules_that_move_a_few_rows_or_numbers_are_not_taken_for_idle() -> None:
    """Rank 1 of 32 rows, and 1 of 50 numbers: 64 numbers of a weight may all be among those that stay."""
    p = torch.nn.Parameter(torch.ones(32, 64))
    hidden = {"role": "up", "columns": False, "head_dim": 0}
    groups = [
        {"params": [("w", p)], **hidden},
        {"params": [("b", torch.nn.Parameter(torch.ones(64)))], "role": "vector"},
    ]
    for name, options, whole in (
        ("grass", {"rank": 1}, False), ("frugal", {"rank": 1}, True), ("galore", {"rank": 1}, True),
        ("spam", {"density": 0.02}, False), ("spam", {}, True),
    ):  # fmt: skip
        rule = load(name, "update rule")([dict(group) for group in groups], lr=1e-3, **options)
        assert [rule.moves_all(q) for q in rule.parameters()] == [whole, True], name


def test_a_sample_has_numbers_of_many_columns() -> None:
    numbers = torch.arange(96.0 * 96).view(96, 96)
    assert len(set((_sample(numbers) % 96).tolist())) > 40
    assert len(_sample(torch.ones(3))) == 3
