"""`train.restart`: moments begin anew when it says, the rate climbs back, and balanced factors keep their product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import skimp.run.restarts
from skimp.core.batch import Batch
from skimp.core.errors import ConflictError, EffectError, RecipeError
from skimp.core.exact import ExactChoices
from skimp.data.synthetic import synthetic_batch
from skimp.optim import reset_moments
from skimp.recipe import load_recipe
from skimp.run.build import Run, build
from skimp.run.restarts import pairs_of
from skimp.run.weights import init_scratch

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 61,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def recipe(*overrides: str) -> Any:
    values = {
        "model": "tiny", "data": {"train": "pydoc", "seq_len": 12, "validation": None}, "output": "runs/x",
        "train": {"steps": 20, "batch_tokens": 24, "lr": 1e-2}, "eval": None,
    }  # fmt: skip
    return load_recipe(values, overrides)


def made(*overrides: str) -> Run:
    return build(recipe(*overrides), ExactChoices(2), CONFIG, fill=lambda model: init_scratch(model, 0))


def batch(step: int) -> Batch:
    return synthetic_batch(12, 2, 61, None, step)


def weights(run: Run) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.parameters()}


def test_it_is_a_reset_by_hand_and_a_rate_that_climbs_back() -> None:
    """every 3, warmup 2: steps 3, 4, 5 at 1/3, 2/3 and 1 of the rate, and again at 6; to the bit."""
    one, two = made("train.restart={every: 3, warmup: 2}"), made()
    factors = [1, 1, 1, 1 / 3, 2 / 3, 1, 1 / 3, 2 / 3]
    for step, factor in enumerate(factors):
        one.step(batch(step))
        if step in (3, 6):
            reset_moments(two.optimizer)
        two.set_lr(1e-2 * factor)
        two.step(batch(step))
        two.set_lr(1e-2)
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(two).values(), strict=True))
    assert all(group["lr"] == 1e-2 for group in one.optimizer.param_groups)
    assert one.notes == ["restart: moments of 21 parameters begin anew"] * 2
    steps = {n: v for n, key, v in one.optimizer.named_state() if key == "step"}
    assert set(steps.values()) == {2}


def test_until_ends_it() -> None:
    run = made("train.restart={every: 2, until: 4}")
    for step in range(7):
        run.step(batch(step))
    assert {v for _, key, v in run.optimizer.named_state() if key == "step"} == {5}


def test_a_step_that_is_taken_again_restarts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("train.restart=2")
    calls = []
    monkeypatch.setattr(skimp.run.restarts, "reset_moments", lambda optimizer: calls.append(1) or 1)
    for step in range(2):
        run.step(batch(step))
    loss, run.stepper.loss = run.stepper.loss, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.step(batch(2))
    run.stepper.loss = loss
    run.step(batch(2))
    assert len(calls) == 1


def test_refactored_pairs_are_balanced_and_their_product_stays() -> None:
    """BᵀB = A·Aᵀ, diagonal; B·A as before to float32; moments of the pairs are zero before the step."""
    run = made("adapter={r: 3}", "train.restart={every: 2, refactor: true}")
    for step in range(2):
        run.step(batch(step))
    pairs = pairs_of(run.model)
    before = [(b.double() @ a.double()).clone() for b, a in pairs]
    with run.due():
        assert not any(run.optimizer.state[b]["m"].any() for b, _ in pairs)
    assert run.notes == [f"restart: {len(pairs)} pairs refactored, 0 left alone"]
    for (b, a), product in zip(pairs, before, strict=True):
        scale = float(product.detach().abs().max())
        torch.testing.assert_close(b.double() @ a.double(), product, rtol=0, atol=1e-6 * scale)
        gram = a.double() @ a.double().T
        torch.testing.assert_close(b.double().T @ b.double(), gram, rtol=0, atol=2e-6 * float(gram.detach().max()))
        torch.testing.assert_close(gram, gram.diag().diag(), rtol=0, atol=2e-6 * float(gram.detach().max()))


def test_mutation_a_reset_that_finds_nothing_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skimp.run.restarts, "reset_moments", lambda optimizer: 0)
    run = made("train.restart=1")
    run.step(batch(0))
    with pytest.raises(EffectError, match="momentum reset before step 2"):
        run.step(batch(1))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.restart={every: 0}", r"at least 1|greater than or equal to 1"),
        ("train.restart={every: 4, warmup: 4}", r"warmup below every \(4\)[\s\S]*warmup: 2"),
        ("train.restart={every: 4, until: 3}", r"until above every \(4\)[\s\S]*until: null"),
        ("train.restart=20", r"below train\.steps \(20\)[\s\S]*train\.restart\.every=5"),
        ("train.restart={every: 4, refactor: true}", r"no two factors[\s\S]*adapter=lora"),
        ("train.restart={evry: 4}", r"evry"),
        ("train.restart=often", r"restart"),
    ],
)
def test_what_a_recipe_refuses(override: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(override)


def test_a_rule_that_resets_itself_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"spam[\s\S]*every: 200"):
        made("train.restart=4", "optimizer=spam")
