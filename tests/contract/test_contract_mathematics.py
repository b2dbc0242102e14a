"""Exact techniques change memory and nothing else: equal to the bit where no sum is reordered, else to
rounding."""

from __future__ import annotations

import pytest
import torch
from contract_rows import CELLS, FAMILY, TECHNIQUES, Technique, batch_of, make_run, weights
from torch import Tensor

from skimp.run.build import Run

EXACT = [name for name, line in TECHNIQUES.items() if line.base is not None]
BIT_EQUAL = [name for name in EXACT if not TECHNIQUES[name].reordered]
REORDERED = [name for name in EXACT if TECHNIQUES[name].reordered]
FAST = [(t, "llama-tied") for t in EXACT] + [("in-backward", "gpt2"), ("recompute", "gemma2")]
FAST_BITS = [cell for cell in FAST if cell[0] in BIT_EQUAL]
SLOW_BITS = [cell for cell in CELLS if cell[0] in BIT_EQUAL and cell not in FAST_BITS]


def moved(technique: str, style: str, steps: int = 3) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights."""
    run = make_run(technique, style)
    results = [run.step(batch_of(technique, seed=i)) for i in range(steps)]
    return [r.loss for r in results], [r.grad_norm for r in results], weights(run)


def final_gradients(run: Run, technique: str) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and the gradients that one step gives to the update rule; nothing moves."""
    seen: dict[str, Tensor] = {}
    rule = run.optimizer
    rule.step_parameter = lambda p, grad=None: seen.update({rule.name_of(p): grad.detach().clone()})
    result = run.step(batch_of(technique))
    return result.loss, result.grad_norm, seen


def same_bits(technique: str, style: str) -> None:
    base = TECHNIQUES[technique].base
    assert base is not None
    found, expected = moved(technique, style), moved(base, style)
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    different = [n for n in expected[2] if not torch.equal(found[2][n], expected[2][n])]
    assert not different


@pytest.mark.parametrize(("technique", "style"), FAST_BITS)
def test_losses_norms_and_weights_are_bit_equal(technique: str, style: str) -> None:
    same_bits(technique, style)


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "style"), SLOW_BITS)
def test_bit_equal_in_every_style(technique: str, style: str) -> None:
    same_bits(technique, style)


def same_to_rounding(technique: str, style: str) -> None:
    base = TECHNIQUES[technique].base
    assert base is not None
    loss, norm, found = final_gradients(make_run(technique, style), technique)
    base_loss, base_norm, expected = final_gradients(make_run(base, style), base)
    # float32 sums of 96 tokens in another order: 96 * 6e-8 = 6e-6 of the sum's size at worst.
    assert loss == pytest.approx(base_loss, rel=3e-6)
    assert norm == pytest.approx(base_norm, rel=6e-6)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=0.0, atol=6e-6 * max(1e-3, float(grad.abs().max())))


@pytest.mark.parametrize("technique", REORDERED)
def test_gradients_are_equal_to_rounding(technique: str) -> None:
    same_to_rounding(technique, "llama-tied")


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "style"), [(t, s) for t, s in CELLS if t in REORDERED and s != "llama-tied"])
def test_gradients_are_equal_to_rounding_in_every_style(technique: str, style: str) -> None:
    same_to_rounding(technique, style)


@pytest.mark.parametrize("technique", ["8-bit", "bf16", "bf16-mixed", "smoothing-z", "packing", "no-clip"])
def test_what_changes_the_mathematics_is_seen_to(technique: str) -> None:
    """The comparison above can fail: these techniques are not the plain run."""
    plain, other = moved("plain", "llama"), moved(technique, "llama")
    assert any(not torch.equal(plain[2][n], other[2][n]) for n in plain[2])
    assert other[0] == pytest.approx(plain[0], rel=0.1)


@pytest.mark.parametrize(
    ("compact", "style"),
    [("grass-compact", "gpt2"), ("grass-compact-in-backward", "llama-tied"), ("galore8bit-compact", "llama-tied")],
)
def test_compact_gradients_train_as_whole_ones_do(compact: str, style: str) -> None:
    """Losses of the run that forms every gradient, over two changes of basis; where a product is summed in another
    order 8-bit codes may fall on the other side of a bound."""
    whole = Technique(overrides=(FAMILY[compact.split("-")[0]], "train.clip=null"))
    exact = {"in_backward": True} if "in-backward" in compact else {}
    line = Technique(exact, (*whole.overrides, "optimizer.compact=true"))
    found, expected = (
        [make.step(batch_of(whole, seed=i)).loss for i in range(5)]
        for make in (make_run(line, style), make_run(whole, style))
    )
    assert found == pytest.approx(expected, rel=1e-4 if "8bit" in compact else 1e-5)
    assert len(set(found)) == len(found)
