"""A layer with trained codebooks against the paper's one-hot form: value, every gradient, the bytes it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import skimp.core.coded
from skimp.adapters.sketch_linear import moved, sketched_linear, sketched_linear_reference
from skimp.core.codecs import Sketch
from skimp.core.coded import Coded
from skimp.core.memory.tracker import Tracker
from skimp.core.remake import can_be_remade

ROWS, SEQ = 3, 7
CODECS = pytest.mark.parametrize("codec", [Sketch(), Sketch(4, 3), Sketch(2), Sketch(2, 4)], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(5, 24), (13, 11), (1, 47)])


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sketched(codec: Sketch, shape: tuple[int, int], dtype: torch.dtype = torch.float64) -> Coded:
    weight = numbers(*shape, seed=1)
    return Coded(codec.encode(weight), codec, weight.shape, dtype)


def dense_form(base: Coded, shift: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The reference, its columns padded to whole groups: a column that is not there has an input of 0."""
    codec: Any = base.codec
    outputs, inputs = base.shape
    codes = codec._split(base.parts["codes"])
    padded = torch.nn.functional.pad(x, (0, codes.shape[1] - inputs))
    grid = base.parts["grid"].double() + shift.double().view(base.parts["grid"].shape)
    return sketched_linear_reference(padded, grid, codes.view(outputs, -1), bias)


def gradients(y: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, wanted, numbers(*y.shape, seed=5, dtype=y.dtype))


@CODECS
@SHAPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("one_slice", [True, False])
def test_value_and_gradients_are_those_of_the_one_hot_form(
    codec: Sketch, shape: tuple[int, int], bias: bool, one_slice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skimp.core.coded, "SLICE", 2**20 if one_slice else 2 * shape[1])
    base = sketched(codec, shape)
    x = numbers(ROWS, SEQ, shape[1], seed=0).requires_grad_()
    shift = numbers(shape[0], codec.groups * 2**codec.bits, seed=3).requires_grad_()
    b = numbers(shape[0], seed=2) if bias else None
    y = sketched_linear(x, base, shift, b)
    plain = dense_form(base, shift, x, b)
    torch.testing.assert_close(y, plain, rtol=0, atol=1e-12)
    for one, other in zip(gradients(y, x, shift), gradients(plain, x, shift), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@CODECS
def test_gradients_by_finite_differences(codec: Sketch) -> None:
    base = sketched(codec, (3, 9))
    x = numbers(2, 9, seed=0).requires_grad_()
    shift = numbers(3, codec.groups * 2**codec.bits, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, shift: sketched_linear(x, base, shift), (x, shift))


@CODECS
def test_sums_are_the_transpose_of_rows_on_any_device(codec: Sketch) -> None:
    """<rows(C), V> = <C, sums(V)> for every C and V; off the CPU the sums are formed another way."""
    base, values = sketched(codec, (4, 26)), numbers(2, 26, seed=4)
    sums = codec.sums(base.parts, base.shape, 1, 3, values)
    grid = base.parts["grid"][1:3].double()
    torch.testing.assert_close(
        (codec.rows(base.parts, (4, 26), 1, 3, torch.float64) * values).sum(), (grid * sums).sum()
    )

    class Elsewhere(torch.Tensor):
        device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]

    again = codec.sums(base.parts, base.shape, 1, 3, values.as_subclass(Elsewhere)).as_subclass(Tensor)
    torch.testing.assert_close(again, sums, rtol=0, atol=1e-12)


def test_one_step_of_sgd_moves_every_weight_by_the_sum_over_its_class() -> None:
    """ΔW = -lr Σ dW over row, group and code: the sum and not the mean; full rank, as no thin product has."""
    codec, lr = Sketch(2, 2), 0.1
    base = sketched(codec, (12, 16))
    x = numbers(5, 16, seed=0)
    shift = torch.zeros(12, 8, dtype=torch.float64, requires_grad=True)
    y = sketched_linear(x, base, shift)
    upstream = numbers(5, 12, seed=6)
    (gradient,) = torch.autograd.grad(y, (shift,), upstream)
    change = moved(base, -lr * gradient).dense() - base.dense()
    dense, codes = upstream.t() @ x, codec._split(base.parts["codes"])
    for i in range(12):
        for j in range(16):
            alike = [k for k in range(16) if k // 8 == j // 8 and codes[i, k] == codes[i, j]]
            assert abs(float(change[i, j] + lr * dense[i, alike].sum())) < 1e-12
    assert torch.linalg.matrix_rank(change) == 12


def test_products_in_bfloat16_are_summed_in_float32_and_autocast_is_kept() -> None:
    base = sketched(Sketch(4, 2), (6, 40), torch.bfloat16)
    shift = torch.zeros(6, 32, requires_grad=True)
    x = numbers(ROWS, SEQ, 40, seed=0, dtype=torch.bfloat16).requires_grad_()
    y = sketched_linear(x, base, shift)
    dx, dshift = gradients(y, x, shift)
    assert (y.dtype, dx.dtype, dshift.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = gradients(dense_form(base, shift, x.double(), None), shift)[0]
    assert (dshift - exact).norm() < 0.02 * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):
        again = sketched_linear(x.float(), base, shift)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again, y)


def test_nothing_is_kept_but_the_input_or_what_it_is_made_from() -> None:
    base, shift = sketched(Sketch(), (16, 64), torch.float32), torch.zeros(16, 16, requires_grad=True)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    x = numbers(9, 64, seed=0, dtype=torch.float32).requires_grad_()
    with saved_tensors_hooks(keep, lambda t: t):
        sketched_linear(x, base, shift)
    assert [t.data_ptr() for t in kept] == [shift.data_ptr(), x.data_ptr()]
    half = numbers(9, 64, seed=0, dtype=torch.float32).requires_grad_()
    made = can_be_remade(half * 2, lambda half: half * 2, half)
    kept.clear()
    with saved_tensors_hooks(keep, lambda t: t):
        y = sketched_linear(made, base, shift)
    assert [t.data_ptr() for t in kept] == [shift.data_ptr(), half.data_ptr()]
    torch.testing.assert_close(
        gradients(y, shift), gradients(sketched_linear(made.detach(), base, shift), shift), rtol=0, atol=0
    )


def test_neither_weight_nor_gradient_exists_whole() -> None:
    """A matrix of four slices: in forward and backward the workspace is that of one."""
    shape = (4096, 2048)
    codec = Sketch()
    parts = {
        "codes": torch.randint(0, 256, (4096, 1024), dtype=torch.uint8),
        "grid": torch.randn(4096, 1, 16).half().sort(-1).values,
    }
    base, shift = Coded(parts, codec, torch.Size(shape), torch.float32), torch.zeros(4096, 16, requires_grad=True)
    x = torch.randn(4, 2048, requires_grad=True)
    with Tracker() as tracker:
        sketched_linear(x, base, shift).sum().backward()
    # Of one slice: its codes as int64 (8 MiB), and its numbers twice or their gradients twice (4 MiB each).
    assert tracker.peak.total < 24 * 2**20
    assert tracker.peak.total < 0.75 * 4 * shape[0] * shape[1]
