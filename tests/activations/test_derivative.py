"""Coded derivatives: values to the bit, gradients within what their codes lose, bytes as said, in both forms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from skimp.activations import derivative_codes
from skimp.activations.derivative import PLAIN, Coding, gated, pointwise
from skimp.activations.derivative_codes import code_bytes
from skimp.activations.derivative_norm import norm, softmax
from skimp.activations.derivative_tables import DERIVATIVES, block_levels, bounds, cells
from skimp.core import noise
from skimp.core.errors import SkimpError
from skimp.core.position import declared_position
from skimp.kernels.native import derivative as native

EXACT = Coding(bits=16)
KINDS = [*DERIVATIVES, "relu"]
FORMS = ["reference", pytest.param("native", marks=pytest.mark.skipif(not native.available(), reason="not built"))]


def drawn(*shape: int, seed: int = 0, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


@pytest.fixture
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(native, "available", lambda: False)
    return str(request.param)


def gradients(fn: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(fn(*leaves), leaves, dy)


def saved_bytes(fn: Callable[[], Tensor], skip: tuple[Tensor, ...] = ()) -> int:
    """Bytes that autograd holds after the forward, but for `skip`'s."""
    held: dict[int, int] = {}
    known = {t.untyped_storage().data_ptr() for t in skip}

    def pack(t: Tensor) -> Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn()
    assert y.requires_grad
    return sum(size for at, size in held.items() if at not in known)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_plain_function_to_the_bit(form: str, kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = drawn(3, 41, dtype=dtype)
        assert torch.equal(pointwise(x.clone().requires_grad_(), kind), PLAIN[kind](x))
        if kind != "relu":
            c = drawn(3, 41, seed=1, dtype=dtype)
            assert torch.equal(gated(x.clone().requires_grad_(), c, kind), PLAIN[kind](x) * c)


@pytest.mark.parametrize("kind", KINDS)
def test_without_codes_gradients_are_autograds(kind: str) -> None:
    x, c, dy = (drawn(5, 7, seed=i, dtype=torch.float64) for i in range(3))
    (found,) = gradients(lambda a: pointwise(a, kind, EXACT), dy, x)
    (wanted,) = gradients(PLAIN[kind], dy, x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    if kind != "relu":
        both = gradients(lambda a, b: gated(a, b, kind, EXACT), dy, x, c)
        torch.testing.assert_close(both, gradients(lambda a, b: PLAIN[kind](a) * b, dy, x, c), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("grid", ["lloyd", "uniform"])
@pytest.mark.parametrize("kind", list(DERIVATIVES))
def test_each_gradient_is_within_the_largest_half_gap(form: str, kind: str, grid: Any) -> None:
    table = cells(kind, grid)
    low, high = bounds(kind)
    if grid == "uniform":
        assert table.worst == pytest.approx((high - low) / 30, rel=1e-5)
    else:
        assert table.worst < 0.048
        assert {0.0, 1.0} <= set(table.levels)
    for shape in ((1,), (3, 21), (1, 65537)):
        x, dy = drawn(*shape, scale=4.0), drawn(*shape, seed=1)
        (found,) = gradients(lambda a: pointwise(a, kind, Coding(grid=grid)), dy, x)
        (wanted,) = gradients(PLAIN[kind], dy.double(), x.double())
        assert ((found - wanted).abs() <= dy.abs() * (table.worst + 1e-6)).all()


def test_relu_takes_one_bit_and_is_exact() -> None:
    x, dy = drawn(3, 19), drawn(3, 19, seed=1)
    assert torch.equal(gradients(lambda a: pointwise(a, "relu"), dy, x)[0], gradients(F.relu, dy, x)[0])
    assert saved_bytes(lambda: pointwise(x.clone().requires_grad_(), "relu")) == -(-57 // 8)


def test_codes_of_both_forms_are_the_same_bits() -> None:
    if not native.available():
        pytest.skip("native kernels not built")
    for kind in DERIVATIVES:
        x, table = drawn(7, 333, scale=3.0), cells(kind)
        fast = derivative_codes.code_derivative(x, table)
        # Another layout of the same numbers is not taken by the native form.
        slow = derivative_codes.code_derivative(x.t().contiguous().t(), table)
        assert torch.equal(derivative_codes.unpack(fast, x.numel()), derivative_codes.unpack(slow, x.numel()))


def test_kept_bytes_are_half_a_byte_a_number_and_x_is_gone() -> None:
    n = 8 * 129
    assert code_bytes(64 * 7) == 64 * 7 // 2
    x = drawn(8, 129).requires_grad_()
    assert saved_bytes(lambda: pointwise(x, "gelu")) == code_bytes(n)
    a, c = (drawn(8, 128, seed=i).requires_grad_() for i in range(2))
    assert saved_bytes(lambda: gated(a, c, "silu")) == 3 * 8 * 64 + 2 * 4 * 8 * 2
    gain = torch.ones(129)
    rows = saved_bytes(lambda: norm(x, gain, None, 1e-5, centred=False), (gain,))
    assert rows == 8 * (derivative_codes.block_bytes(129) + 4)

    for make in (
        lambda a: pointwise(a, "silu"),
        lambda a: gated(a, torch.ones_like(a), "silu"),
        lambda a: norm(a, gain, None, 1e-5, centred=True),
        softmax,
    ):
        held = drawn(8, 129).requires_grad_()
        inner = held * 1.0  # a node of the graph, as a layer's input is
        gone = weakref.ref(inner)
        y = make(inner)
        del inner
        gc.collect()
        assert gone() is None
        assert y.requires_grad


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
def test_a_norms_gradient_from_its_scale_and_its_normalised_input_is_exact(centred: bool, eps: float) -> None:
    x, dy = drawn(4, 37, dtype=torch.float64), drawn(4, 37, seed=1, dtype=torch.float64)
    gain, bias = drawn(37, seed=2, dtype=torch.float64), drawn(37, seed=3, dtype=torch.float64)

    def plain(a: Tensor, b: Tensor) -> Tensor:
        shifted = a - a.mean(-1, keepdim=True) if centred else a
        return shifted * torch.rsqrt(shifted.pow(2).mean(-1, keepdim=True) + eps) * gain + b

    found = gradients(lambda a, b: norm(a, gain, b, eps, centred=centred, coding=EXACT), dy, x, bias)
    torch.testing.assert_close(found, gradients(plain, dy, x, bias), rtol=1e-10, atol=1e-10)
    moved = gradients(lambda a: norm(a, gain - 1.0, None, eps, centred=centred, offset=1.0, coding=EXACT), dy, x)
    torch.testing.assert_close(moved, found[:1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS, indirect=True)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [1, 48, 64, 130, 576])
def test_a_norms_gradient_in_4_bits_is_within_its_bound(form: str, centred: bool, width: int) -> None:
    """|error| <= s (|e| mean|u xh| + (|xh| + |e|) mean|u e|), e a half-gap of its block's maximum."""
    x, dy, gain = drawn(5, width), drawn(5, width, seed=1), drawn(width, seed=2)
    coded = gradients(lambda a: norm(a, gain, None, 1e-5, centred=centred), dy, x)[0]
    exact = gradients(lambda a: norm(a, gain, None, 1e-5, centred=centred, coding=EXACT), dy, x)[0]
    shifted = x - x.mean(-1, keepdim=True) if centred else x
    scale = torch.rsqrt(shifted.pow(2).mean(-1, keepdim=True) + 1e-5)
    unit, u = shifted * scale, dy * gain
    gaps = torch.tensor(block_levels()).diff().max() / 2
    most = F.pad(unit, (0, -width % 64)).unflatten(-1, (-1, 64)).abs().amax(-1)
    lost = gaps * most.repeat_interleave(64, -1)[:, :width] + 1e-6
    inner = (u * unit).mean(-1, keepdim=True).abs()
    bound = scale * (lost * inner + (unit.abs() + lost) * (u.abs() * lost).mean(-1, keepdim=True))
    assert ((coded - exact).abs() <= bound * (1 + 1e-4) + 1e-5 * scale).all()


@pytest.mark.parametrize("form", FORMS, indirect=True)
def test_a_gated_products_gradients_are_within_their_bounds(form: str) -> None:
    for kind in ("silu", "gelu_tanh", "gelu"):
        a, c, dy = (drawn(3, 215, seed=i) for i in range(3))
        da, dc = gradients(lambda p, q, kind=kind: gated(p, q, kind), dy, a, c)
        wa, wc = gradients(lambda p, q, kind=kind: PLAIN[kind](p) * q, dy, a, c)
        gap = float(torch.tensor(block_levels()).diff().max() / 2)

        def lost(t: Tensor, gap: float = gap) -> Tensor:
            most = F.pad(t, (0, -t.shape[-1] % 64)).unflatten(-1, (-1, 64)).abs().amax(-1)
            return gap * most.repeat_interleave(64, -1)[:, : t.shape[-1]] + 1e-5

        worst = cells(kind).worst + 1e-6
        slope = gradients(PLAIN[kind], torch.ones_like(a), a)[0].abs()
        assert ((dc - wc).abs() <= dy.abs() * lost(PLAIN[kind](a))).all()
        assert ((da - wa).abs() <= dy.abs() * (worst * c.abs() + (slope + worst) * lost(c))).all()


def test_softmaxs_gradient_is_exact_without_codes_and_close_with_them() -> None:
    x, dy = drawn(2, 3, 29, dtype=torch.float64), drawn(2, 3, 29, seed=1, dtype=torch.float64)
    wanted = gradients(lambda a: torch.softmax(a, -1), dy, x)
    torch.testing.assert_close(gradients(lambda a: softmax(a, EXACT), dy, x), wanted, rtol=1e-10, atol=1e-10)
    found = gradients(softmax, dy, x)[0]
    # A share is off by a quarter of its power of 2 at most; two errors of it, and what lies below the smallest.
    assert (found - wanted[0]).abs().max() <= 0.3 * wanted[0].abs().max()
    assert (found.sum(-1).abs() < 1e-6).all()  # the rows of p sum to 1 again
    assert saved_bytes(lambda: softmax(x.clone().requires_grad_())) == 6 * code_bytes(29) + 6 * 4


def test_stochastic_rounding_has_the_derivative_as_its_mean() -> None:
    """z-scores of 1,000 draws at 600 points: about 0.3 % beyond 3, none beyond 5."""
    n, draws = 600, 1000
    x = drawn(1, n, scale=1.5)
    table = cells("gelu")
    levels = torch.tensor(table.levels, dtype=torch.float64)
    slope = gradients(F.gelu, torch.ones(1, n, dtype=torch.float64), x.double())[0][0]
    inside = (slope > levels[0]) & (slope < levels[-1])
    total = torch.zeros(n, dtype=torch.float64)
    for step in range(draws):
        with declared_position(step, 0):
            coding = Coding(rounding="stochastic", seed=1, name="layer")
            total += gradients(lambda a, coding=coding: pointwise(a, "gelu", coding), torch.ones(1, n), x)[0][0]
    below = torch.bucketize(slope, levels, right=True) - 1
    below = below.clamp(0, 14)
    low, high = levels[below], levels[below + 1]
    share = (slope - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / draws).sqrt()
    kept = inside & (share > 1e-3) & (share < 1 - 1e-3)  # at a level nothing is drawn
    z = ((total / draws - slope) / deviation)[kept].abs()
    assert kept.sum() > 400
    assert (z > 3).double().mean() < 0.012
    assert z.max() < 5


def test_stochastic_draws_are_addressed_and_refused_without_an_address() -> None:
    x = drawn(4, 31)
    coding = Coding(rounding="stochastic", seed=3, name="a")

    def slopes(step: int, row: int, part: Tensor) -> Tensor:
        with declared_position(step, row):
            return gradients(lambda a: pointwise(a, "silu", coding), torch.ones_like(part), part)[0]

    whole = slopes(2, 0, x)
    assert torch.equal(whole, slopes(2, 0, x))
    assert torch.equal(whole[2:], slopes(2, 2, x[2:]))
    assert not torch.equal(whole, slopes(3, 0, x))
    with pytest.raises(SkimpError, match="not declared"):
        pointwise(x.requires_grad_(), "silu", coding)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: pointwise(x, "gelu", EXACT),
        lambda x: pointwise(x, "silu", EXACT),
        lambda x: pointwise(x, "gelu_tanh", EXACT),
        lambda x: gated(x[:2], x[2:], "silu", EXACT),
        lambda x: norm(x, torch.ones(5, dtype=torch.float64), None, 1e-6, centred=True, coding=EXACT),
        lambda x: norm(x, torch.ones(5, dtype=torch.float64), None, 1e-6, centred=False, coding=EXACT),
        lambda x: softmax(x, EXACT),
    ],
)
def test_gradcheck_passes_and_a_second_derivative_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    x = drawn(4, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(fn, (x,))
    (first,) = torch.autograd.grad(fn(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_unknown_activations_and_trained_gains_are_refused() -> None:
    with pytest.raises(SkimpError, match="'mish'"):
        pointwise(torch.ones(3), "mish")
    with pytest.raises(SkimpError, match="'relu'"):
        gated(torch.ones(3), torch.ones(3), "relu")
    with pytest.raises(SkimpError, match="its gain trains"):
        norm(torch.ones(2, 3), torch.ones(3, requires_grad=True), None, 1e-5, centred=False)


def test_threads_do_not_change_a_bit() -> None:
    x, c = drawn(4, 257, 96), drawn(4, 257, 96, seed=1)
    gain = torch.rand(96, generator=torch.Generator().manual_seed(2))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(
                gradients(
                    lambda a, b: gated(norm(a, gain, None, 1e-5, centred=False), b, "silu"), torch.ones_like(x), x, c
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_block_levels_lose_less_than_quantiles_do() -> None:
    """Mean squared error on normal numbers below that of levels of equal probability (what NF4 is made of)."""
    x = noise.normal(0, "levels", 0, 64 * 4096).view(-1, 64)
    u = x / x.abs().amax(-1, keepdim=True)
    q = torch.special.ndtri(torch.linspace(0.5, 0.9677083, 9))[1:]
    quantiles = torch.cat([-torch.special.ndtri(torch.linspace(0.5, 0.9677083, 8))[1:].flip(0), torch.zeros(1), q])
    low = torch.special.ndtri(torch.tensor(0.9677083))

    def error(levels: Tensor) -> float:
        index = torch.bucketize(u, (levels[1:] + levels[:-1]) / 2)
        return float((levels[index] - u).pow(2).mean())

    ours, theirs = error(torch.tensor(block_levels())), error(quantiles / low)
    assert ours < theirs
    assert {-1.0, 0.0, 1.0} <= set(block_levels())
