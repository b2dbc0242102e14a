"""The adapted layer against the plain formula: value and every gradient, in float64, with and without dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.adapters.dropout import Dropout, dropout_here
from skimp.adapters.linear import lora_linear, lora_linear_reference
from skimp.core.errors import SkimpError
from skimp.core.position import declared_position
from skimp.core.remake import can_be_remade, how_made
from skimp.kernels.fused import rms_norm, swiglu
from skimp.kernels.native import library

ROWS, SEQ = 3, 7


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def case(outputs: int, inputs: int, r: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        "x": numbers(ROWS, SEQ, inputs, seed=0, dtype=dtype).requires_grad_(),
        "weight": numbers(outputs, inputs, seed=1, dtype=dtype),
        "bias": numbers(outputs, seed=2, dtype=dtype),
        "a": numbers(r, inputs, seed=3, dtype=dtype).requires_grad_(),
        "b": numbers(outputs, r, seed=4, dtype=dtype).requires_grad_(),
    }


def gradients(y: Tensor, given: dict[str, Any]) -> list[Tensor]:
    upstream = numbers(*y.shape, seed=5, dtype=y.dtype)
    return list(torch.autograd.grad(y, [given["x"], given["a"], given["b"]], upstream))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5, 3, 2), (3, 11, 1), (8, 8, 9)])
def test_value_and_every_gradient(shape: tuple[int, int, int], p: float, transposed: bool, bias: bool) -> None:
    given = case(*shape)
    given["bias"] = given["bias"] if bias else None
    masks = Dropout(p, 7, "layer", 4, 0) if p else None
    mask = masks.mask(0, ROWS * SEQ, given["x"].detach().reshape(-1, shape[1])).view(ROWS, SEQ, -1) if masks else None
    plain = lora_linear_reference(*given.values(), scale=0.7, mask=mask)
    stored = {**given, "weight": given["weight"].t().contiguous()} if transposed else given
    found = lora_linear(*stored.values(), 0.7, transposed=transposed, dropout=masks)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(gradients(found, stored), gradients(plain, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert mine.is_contiguous()


def test_many_pieces_of_a_mask_are_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case(5, 3, 2)
    masks = Dropout(0.4, 7, "layer", 4, 0)
    whole = lora_linear(*given.values(), 0.7, dropout=masks)
    expected = gradients(whole, given)
    monkeypatch.setattr("skimp.adapters.dropout.PIECE", 2 * 3)
    assert len(list(masks.pieces(ROWS * SEQ, 3))) == 11
    found = lora_linear(*given.values(), 0.7, dropout=masks)
    torch.testing.assert_close(found, whole, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(gradients(found, given), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_with_b_zero_it_is_the_base_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = case(6, 5, 2, dtype)
        given["b"] = torch.zeros(6, 2, dtype=torch.float32, requires_grad=True)
        given["a"] = given["a"].detach().float().requires_grad_()
        found = lora_linear(*given.values(), 3.0)
        assert torch.equal(found, torch.nn.functional.linear(given["x"], given["weight"], given["bias"]))


def test_only_the_input_is_kept_and_no_gradient_of_the_weight_is_made() -> None:
    given = case(6, 5, 2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = lora_linear(*given.values(), 1.0)
    assert {t.data_ptr() for t in kept} == {given[k].data_ptr() for k in ("x", "weight", "a", "b")}
    assert y.grad_fn is not None
    assert [edge is None or edge[0] is None for edge in y.grad_fn.next_functions] == [False, True, True, False, False]


def test_an_input_without_gradient_gets_none() -> None:
    given = case(6, 5, 2)
    given["x"] = given["x"].detach()
    y = lora_linear(*given.values(), 1.0)
    da, db = torch.autograd.grad(y.sum(), [given["a"], given["b"]])
    assert da.abs().sum() > 0 < db.abs().sum()


def test_half_precision_keeps_float32_gradients_of_the_addition() -> None:
    given = case(6, 5, 2)
    exact = lora_linear(*given.values(), 0.5)
    expected = gradients(exact, given)
    low = {k: v.detach().to(torch.bfloat16) for k, v in given.items()}
    low["x"].requires_grad_()
    low["a"], low["b"] = given["a"].detach().float().requires_grad_(), given["b"].detach().float().requires_grad_()
    y = lora_linear(*low.values(), 0.5)
    assert y.dtype == torch.bfloat16
    upstream = numbers(*y.shape, seed=5).to(torch.bfloat16)
    dx, da, db = torch.autograd.grad(y, [low["x"], low["a"], low["b"]], upstream)
    assert (dx.dtype, da.dtype, db.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    for mine, theirs in zip((dx, da, db), expected, strict=True):
        # bfloat16 rounds operands and sums to 8 bits: 2**-8 each, a few of them.
        assert (mine.double() - theirs).norm() < 0.02 * theirs.norm()


def test_autocast_computes_in_bfloat16_and_gives_gradients_back_in_float32() -> None:
    given = case(6, 5, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(*given.values(), 0.5)
        plain = torch.nn.functional.linear(given["x"], given["weight"], given["bias"])
    assert y.dtype == plain.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().sum(), [given["x"], given["a"], given["b"]])
    assert {g.dtype for g in grads} == {torch.float32}


def test_masks_are_addressed_by_step_row_and_module() -> None:
    x = torch.ones(4, 5, 6)
    flat = x.reshape(-1, 6)

    def mask(step: int, row: int, module: str = "m", rows: int = 4) -> Tensor:
        with declared_position(step, row):
            return dropout_here(0.5, 3, module, x[:rows]).mask(0, rows * 5, flat)

    whole = mask(2, 0)
    assert torch.equal(whole, mask(2, 0))
    assert torch.equal(whole, torch.cat([mask(2, row, rows=1) for row in range(4)]))
    assert not torch.equal(whole, mask(3, 0))
    assert not torch.equal(whole, mask(2, 0, "n"))
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert 0.3 < float((whole == 0).float().mean()) < 0.7


def test_dropout_without_a_declared_position_is_refused() -> None:
    with pytest.raises(SkimpError, match="declared_position"):
        dropout_here(0.1, 0, "m", torch.ones(1, 2, 3))


@pytest.mark.skipif(not library.available(), reason=library.why())
@pytest.mark.parametrize("kind", ["norm", "activation"])
def test_what_a_fused_layer_made_is_made_again_and_not_kept(kind: str) -> None:
    given = case(6, 5, 2, torch.float32)
    one, two = given["x"], numbers(ROWS, SEQ, 5, seed=8, dtype=torch.float32).requires_grad_()
    gain = numbers(5, seed=9, dtype=torch.float32)

    def fused() -> Tensor:
        return rms_norm(one, gain, 1e-6) if kind == "norm" else swiglu(one, two)

    def gradients_of(x: Tensor) -> list[Tensor]:
        y = lora_linear(x, *(given[k] for k in ("weight", "bias", "a", "b")), 0.5)
        wanted = [one, given["a"], given["b"], *([two] if kind == "activation" else [])]
        return list(torch.autograd.grad(y, wanted, numbers(*y.shape, seed=5, dtype=y.dtype)))

    kept: list[Tensor] = []
    x = fused()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(x, *(given[k] for k in ("weight", "bias", "a", "b")), 0.5)
    held = {t.data_ptr() for t in kept}
    assert x.data_ptr() not in held
    assert held >= {one.data_ptr(), (gain if kind == "norm" else two).data_ptr()}
    # A copy carries no note: the layer keeps it, and nothing else differs.
    for mine, theirs in zip(gradients_of(fused()), gradients_of(fused().clone()), strict=True):
        assert torch.equal(mine, theirs)


def test_nothing_is_noted_where_no_gradient_is_recorded() -> None:
    with torch.no_grad():
        assert how_made(can_be_remade(torch.ones(2), torch.ones_like, torch.ones(2))) is None
    noted = can_be_remade(torch.ones(2), torch.ones_like, torch.ones(2))
    made = how_made(noted)
    assert made is not None
    assert torch.equal(made.again(*made.inputs), noted)
    assert how_made(noted * 1) is None
