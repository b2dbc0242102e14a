"""A linear layer in spectral form: value, every gradient, the enhanced ones, sampling and new decompositions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skimp.adapters.spectral_linear import spectral_linear, spectral_linear_reference
from skimp.adapters.sst_sample import (
    bring_forward,
    decompose,
    decompose_bytes,
    dense,
    probabilities,
    sampled,
)
from skimp.core.memory.oracle import witness
from skimp.core.remake import can_be_remade

ROWS, SEQ = 3, 7
SHAPES = [(5, 9), (9, 5), (6, 6)]


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(outputs: int, inputs: int, rank: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """A decomposed weight with vectors 1, 3, … in front; the leaves as a module holds them."""
    k = min(outputs, inputs)
    u, v, sigma = (torch.empty(*shape, dtype=dtype) for shape in ((k, outputs), (k, inputs), (k,)))
    decompose(numbers(outputs, inputs, seed=1, dtype=dtype), u, v, sigma)
    order = torch.arange(k)
    bring_forward(u, v, order, torch.arange(k)[1::2][:rank] if rank < k else order.clone())
    return {
        "u": u,
        "v": v,
        "sigma": sigma.requires_grad_(),
        "order": order,
        "u_active": u[:rank].detach().requires_grad_(),
        "v_active": v[:rank].detach().requires_grad_(),
        "bias": numbers(outputs, seed=2, dtype=dtype).requires_grad_(),
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_replacement_leaves_outputs_and_dense_is_the_weight_again(shape: tuple[int, int]) -> None:
    given = layer(*shape, 2, torch.float32)
    weight, x = numbers(*shape, seed=1, dtype=torch.float32), numbers(ROWS, SEQ, shape[1], seed=0, dtype=torch.float32)
    y = spectral_linear(x, **given)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, given["bias"]), rtol=0, atol=1e-5)
    back = dense(given["u"], given["v"], given["sigma"], given["order"])
    torch.testing.assert_close(back, weight, rtol=0, atol=1e-5)
    k = min(shape)
    for vectors in (given["u"], given["v"]):
        assert float((vectors @ vectors.t() - torch.eye(k)).abs().max()) < 1e-5


@pytest.mark.parametrize("enhanced", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_gradient(shape: tuple[int, int], enhanced: bool) -> None:
    """dsigma and the true du, dv are autograd's; the enhanced ones are those without the factor sigma."""
    rank = 2
    given = layer(*shape, rank)
    x = numbers(ROWS, SEQ, shape[1], seed=0).requires_grad_()
    y = spectral_linear(x, **given, enhanced=enhanced)
    upstream = numbers(*y.shape, seed=5)
    names = ("sigma", "u_active", "v_active", "bias")
    found = torch.autograd.grad(y, [x, *(given[n] for n in names)], upstream)
    back = torch.argsort(given["order"])
    rows = {n: given[n].detach().index_select(0, back).requires_grad_() for n in ("u", "v")}
    plain = spectral_linear_reference(x, rows["u"], rows["v"], given["sigma"], given["bias"])
    torch.testing.assert_close(y, plain, rtol=0, atol=1e-12)
    dx, dsigma, du, dv, dbias = torch.autograd.grad(
        plain, [x, given["sigma"], rows["u"], rows["v"], given["bias"]], upstream
    )
    first = given["order"][:rank]
    factor = given["sigma"].detach()[first, None] if enhanced else 1.0
    for one, other in zip(found, (dx, dsigma, du[first] / factor, dv[first] / factor, dbias), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_enhanced_gradients_are_finite_where_sigma_is_zero() -> None:
    given = layer(5, 9, 2)
    with torch.no_grad():
        given["sigma"].zero_()
    x = numbers(ROWS, SEQ, 9, seed=0)
    grads = torch.autograd.grad(
        spectral_linear(x, **given),
        [given[n] for n in ("sigma", "u_active", "v_active")],
        numbers(ROWS, SEQ, 5, seed=5),
    )
    assert all(bool(g.isfinite().all()) and float(g.abs().max()) > 0.1 for g in grads)


def test_a_plain_step_moves_the_weight_as_the_product_rule_says() -> None:
    """r = k, true gradients, SGD: dW = -lr (U S^2 U' D + D V S^2 V' + U diag(u' D v) V') + O(lr^2)."""
    outputs, inputs = 4, 6
    x, upstream = numbers(ROWS, SEQ, inputs, seed=0), numbers(ROWS, SEQ, outputs, seed=5)
    residuals = []
    for lr in (1e-3, 5e-4, 2.5e-4):
        given = layer(outputs, inputs, 4)
        before = dense(given["u"], given["v"], given["sigma"], given["order"])
        y = spectral_linear(x, **given, enhanced=False)
        sigma, du, dv = torch.autograd.grad(y, [given[n] for n in ("sigma", "u_active", "v_active")], upstream)
        u, v, s = given["u"].t(), given["v"].t(), given["sigma"].detach()
        d = upstream.reshape(-1, outputs).t() @ x.reshape(-1, inputs)
        square = torch.diag(s**2)
        said = u @ square @ u.t() @ d + d @ v @ square @ v.t() + u @ torch.diag((u.t() @ d @ v).diagonal()) @ v.t()
        moved = dense(given["u"] - lr * du, given["v"] - lr * dv, s - lr * sigma, given["order"]) - before
        residuals.append(float((moved / -lr - said).abs().max()))
        assert float((moved / -lr - d).abs().max()) > 10 * residuals[-1]
    assert residuals[0] / residuals[1] == pytest.approx(2, rel=0.05)
    assert residuals[1] / residuals[2] == pytest.approx(2, rel=0.05)


def test_an_input_that_a_fused_layer_made_is_not_kept() -> None:
    given = layer(5, 9, 2)
    source = numbers(ROWS, SEQ, 9, seed=0)
    plain = torch.autograd.grad(spectral_linear(source, **given).sum(), given["v_active"])[0]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = spectral_linear(can_be_remade(source.clone(), lambda s: s.clone(), source), **given)
    own = {t.untyped_storage().data_ptr() for t in (given["u"], given["v"], given["sigma"], source)}
    assert {t.untyped_storage().data_ptr() for t in kept} == own
    assert torch.equal(torch.autograd.grad(y.sum(), given["v_active"])[0], plain)


# ---------------------------------------------------------------------- which vectors
def test_first_drawn_follows_p_and_sets_do_not() -> None:
    sigma = torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0])
    p = probabilities(sigma, 0.5)
    assert float(p.sum()) == pytest.approx(1.0)
    torch.testing.assert_close(p, 0.5 * (0.2 + sigma.double() / 7.5))
    draws = torch.stack([sampled(sigma, 3, 0.5, 0, "layer", i) for i in range(2500)])
    assert all(len(set(d.tolist())) == 3 for d in draws[:50])
    first = torch.bincount(draws[:, 0], minlength=5) / len(draws)
    assert float((first - p).abs().max()) < 0.03
    inside = torch.bincount(draws.flatten(), minlength=5) / len(draws)
    assert float(inside[0]) < 3 * float(p[0]) - 0.1  # the largest comes up less often than r p
    assert float(inside[4]) > 3 * float(p[4]) + 0.02
    assert float(probabilities(torch.zeros(4), 0.0)[0]) == 0.25


def test_a_draw_is_a_function_of_its_address() -> None:
    sigma = numbers(40, seed=3).abs()
    one = sampled(sigma, 8, 0.5, 1, "layer", 2)
    assert torch.equal(one, sampled(sigma, 8, 0.5, 1, "layer", 2))
    others = [sampled(sigma, 8, 0.5, *where) for where in ((2, "layer", 2), (1, "other", 2), (1, "layer", 3))]
    assert not any(torch.equal(one, other) for other in others)


def test_swaps_move_rows_whole_and_in_place() -> None:
    given = layer(7, 9, 3)
    u, v, order = given["u"], given["v"], given["order"]
    back = torch.argsort(order)
    before, at = (u[back].clone(), v[back].clone()), (u.data_ptr(), v.data_ptr(), order.data_ptr())
    weight = dense(u, v, given["sigma"], order)
    bring_forward(u, v, order, torch.tensor([6, 0, 4]))
    assert order.tolist() == [0, 4, 6, 1, 2, 3, 5]
    assert (u.data_ptr(), v.data_ptr(), order.data_ptr()) == at
    assert torch.equal(u[torch.argsort(order)], before[0])
    assert torch.equal(v[torch.argsort(order)], before[1])
    torch.testing.assert_close(dense(u, v, given["sigma"], order), weight, rtol=0, atol=1e-12)


def test_kept_singular_values_are_the_largest() -> None:
    given = layer(6, 9, 2)
    sigma = given["sigma"].detach()
    cut = dense(given["u"], given["v"], sigma, given["order"], keep=0.5)
    exact = dense(given["u"], given["v"], sigma, given["order"])
    assert torch.linalg.matrix_rank(cut) == 3
    assert float(torch.linalg.matrix_norm(exact - cut)) == pytest.approx(float(sigma[3:].norm()))


@pytest.mark.parametrize("shape", [(96, 96), (64, 160), (160, 64)])
def test_bytes_of_a_decomposition_are_bounded_by_the_formula(shape: tuple[int, int]) -> None:
    k = min(shape)
    u, v, sigma = torch.empty(k, shape[0]), torch.empty(k, shape[1]), torch.empty(k)
    decompose(numbers(*shape, seed=1, dtype=torch.float32), u, v, sigma)
    order = torch.arange(k)
    _, seen = witness(lambda: decompose(dense(u, v, sigma, order), u, v, sigma))
    tensors, _ = decompose_bytes(*shape)
    assert tensors - (20 << 10) < seen.peak <= tensors
