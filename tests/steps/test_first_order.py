"""The first-order step: one normaliser for the whole step, stops on what cannot be trained, packed loss
(B13)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.batch import Batch, stack_rows
from skimp.core.errors import DataError, NonFiniteError
from skimp.core.exact import ExactChoices
from skimp.core.gradients import AfterBackward, InBackward
from skimp.data.synthetic import synthetic_batch
from skimp.recipe import load_recipe
from skimp.run.build import Run, build
from skimp.run.weights import init_scratch
from skimp.steps.first_order import FirstOrder

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 61,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STYLES: dict[str, dict[str, Any]] = {
    **{f: {"model_type": f, **SHAPE} for f in ("llama", "qwen2", "qwen3", "gemma")},
    "llama-tied": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SHAPE, "sliding_window": 5},
    "gemma2": {
        "model_type": "gemma2",
        **SHAPE,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 61,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "vocab_size": 61,
        "word_embed_proj_dim": 32,
    },
}


def make(style: str, seq: int, rows: int, recompute: tuple[int, ...] = ()) -> Run:
    recipe = load_recipe(
        {
            "model": "tiny",
            "data": {"train": "pydoc", "seq_len": seq, "validation": None},
            "output": "runs/none",
            "train": {"steps": 1, "batch_tokens": rows * seq, "clip": None},
            "eval": None,
        }
    )
    return build(recipe, ExactChoices(rows, recompute), dict(STYLES[style]), fill=lambda model: init_scratch(model, 3))


def gradients(run: Run, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    seen: dict[str, Tensor] = {}
    rule = run.optimizer
    rule.step_parameter = lambda p, grad=None: seen.update({rule.name_of(p): grad.clone()})
    return run.stepper.step(batches).loss, seen


@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("style", STYLES)
def test_packed_loss_is_the_token_weighted_mean_of_the_separate_ones(style: str, recompute: tuple[int, ...]) -> None:
    """B13, loss and gradients: documents of 9, 2 and 13 tokens in one row against each in a row of its
    own."""
    cuts = (0, 9, 11, 24)
    packed = synthetic_batch(24, 1, 61, cuts, seed=4)
    parts = [
        Batch(packed.ids[:, a:b], packed.labels[:, a:b], packed.positions[:, a:b], ((0, b - a),), b - a - 1)
        for a, b in itertools.pairwise(cuts)
    ]
    loss, found = gradients(make(style, 24, 1, recompute), [packed])
    run = make(style, 24, 1)
    with torch.no_grad():
        separate = [(float(run.head.loss(p, p.trained)), p.trained) for p in parts]
    run.close()
    mean = sum(value * count for value, count in separate) / sum(count for _, count in separate)
    assert loss == pytest.approx(mean, rel=2e-6)
    _, expected = gradients(make(style, 24, 1), parts)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # float32 sums of at most 24 tokens in another order; the tied head's bias-like rows near zero.
        torch.testing.assert_close(found[name], grad, rtol=0.0, atol=2e-6 * max(1e-2, float(grad.abs().max())))


def scalar(values: list[float]) -> tuple[nn.Parameter, Any]:
    parameter, given = nn.Parameter(torch.ones(1)), iter(values)
    return parameter, lambda batch, normaliser: parameter.sum() * next(given) / normaliser


class Rule:
    def step_parameter(self, parameter: Tensor, grad: Tensor | None = None) -> None:
        assert grad is not None
        parameter.sub_(grad)


def test_nothing_to_train_on_is_an_error_and_not_a_loss_of_zero() -> None:
    """B09."""
    parameter, loss = scalar([1.0])
    step = FirstOrder(loss, AfterBackward([("w", parameter)], Rule(), None))
    whole = synthetic_batch(8, 2, 5)
    masked = Batch(whole.ids, torch.full_like(whole.labels, -100), whole.positions, whole.documents, 0)
    with pytest.raises(DataError, match="at least one trained token in optimizer step 1"):
        step.step([masked])


def test_a_micro_batch_without_trained_tokens_is_fine_beside_others() -> None:
    run = make("llama", 24, 2)
    batch = synthetic_batch(24, 1, 61)
    masked = Batch(batch.ids, torch.full_like(batch.labels, -100), batch.positions, batch.documents, 0)
    loss, found = gradients(run, [batch, masked])
    alone, expected = gradients(make("llama", 24, 1), [batch])
    assert loss == alone
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("kind", [AfterBackward, InBackward])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_anything_moves(kind: Any, bad: float) -> None:
    for clip in (None, 1.0):
        parameter, loss = scalar([bad, bad])
        step = FirstOrder(loss, kind([("w", parameter)], Rule(), clip))
        with pytest.raises(NonFiniteError, match="a finite loss in optimizer step 1"):
            step.step([synthetic_batch(8, 1, 5)])
        assert parameter.item() == 1.0


def test_loss_and_tokens_are_of_the_whole_step() -> None:
    parameter, loss = scalar([14.0, 7.0, 21.0])
    step = FirstOrder(loss, AfterBackward([("w", parameter)], Rule(), None))
    rows = [synthetic_batch(8, 1, 5, seed=i) for i in range(3)]
    result = step.step(rows)
    assert result.trained == stack_rows(rows).trained == 21
    assert result.loss == pytest.approx(2.0)
    assert result.grad_norm == pytest.approx(2.0)
    assert parameter.item() == pytest.approx(-1.0)
    assert step.forwards == 3
