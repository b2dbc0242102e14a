"""One table for every kernel: its forms against the plain reference in float64, values and every gradient.

The native forms here; the Triton ones are held to the same rows by `test_triton_forms`, in a process of their own.
"""

from __future__ import annotations

import pytest
import torch
from forms_table import CASES, Case, compare

from skimp.core.errors import DataError, SkimpError
from skimp.kernels.forms import FORMS, kernel
from skimp.kernels.native import library
from skimp.kernels.native.layers import LAYERS

native = pytest.mark.skipif(
    not (library.available() and LAYERS.available()), reason=library.why() or "native layer kernels not built"
)


def test_every_kernel_has_its_rows() -> None:
    assert {case.name for case in CASES} == set(FORMS)


@native
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_values_and_gradients(case: Case) -> None:
    compare(case, "native")


@native
@pytest.mark.parametrize("case", [c for c in CASES if c.halves], ids=str)
def test_native_halves_are_rounded_once(case: Case) -> None:
    """Half of a bfloat16 ulp of the float64 result of the same halves, 2^-8."""
    compare(case, "native", torch.bfloat16)


@native
@pytest.mark.parametrize("case", [c for c in CASES if c.name not in ("rotary",)], ids=str)
def test_inputs_are_left_alone_and_a_second_backward_is_the_same(case: Case) -> None:
    tensors = case.make(torch.float32)
    before = [t.clone() for t in tensors]
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in tensors]
    y = kernel(case.name, "native")(*leaves, **case.options)
    upstream = torch.ones_like(y)
    wanted = [t for t in leaves if t.requires_grad and case.differentiates(t, leaves)]
    first = torch.autograd.grad(y, wanted, upstream, retain_graph=True)
    second = torch.autograd.grad(y, wanted, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(upstream, torch.ones_like(y))
    with torch.no_grad():  # eval: the same numbers, nothing kept
        again = kernel(case.name, "native")(*tensors, **case.options)
    assert torch.equal(again, y.detach())
    assert not again.requires_grad


@native
def test_threads_do_not_change_a_bit_of_any() -> None:
    before = torch.get_num_threads()
    found: list[list[torch.Tensor]] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([])
            for case in CASES:
                leaves = [t.requires_grad_() if t.is_floating_point() else t for t in case.make(torch.float32)]
                y = kernel(case.name, "native")(*leaves, **case.options)
                wanted = [t for t in leaves if t.requires_grad and case.differentiates(t, leaves)]
                found[-1] += [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))]
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@native
def test_the_gradient_is_written_over_the_logits_only_when_they_may_go() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 37), torch.randint(37, (7,))
    call = kernel("cross_entropy", "native")
    plain = logits.clone().requires_grad_()
    call(plain * 1.0, labels).sum().backward()
    leaf = logits.clone().requires_grad_()
    held = leaf * 1.0
    loss = call(held, labels, overwrite=True).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, plain.grad)
    assert torch.equal(held.detach(), plain.grad)  # no second tokens x vocabulary matrix
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    kept = logits.clone()
    with torch.no_grad():
        call(kept, labels, overwrite=True)
    assert torch.equal(kept, logits)


@native
def test_labels_outside_the_vocabulary_are_an_error_of_the_data() -> None:
    for wrong in (37, -1):
        with pytest.raises(DataError, match=r"0 \.\. 36"):
            kernel("cross_entropy", "native")(torch.zeros(2, 37), torch.tensor([3, wrong]))
    with pytest.raises(SkimpError, match="int64"):
        kernel("cross_entropy", "native")(torch.zeros(2, 37), torch.tensor([3, 1], dtype=torch.int32))


@native
def test_extremes_and_non_finite_numbers_pass_through_gelu() -> None:
    x = torch.tensor([-1e30, -1e4, -88.0, -5.0, -1e-6, 0.0, 1e-6, 5.0, 88.0, 1e4, 1e30])
    for by_tanh in (False, True):
        leaf = x.clone().requires_grad_()
        y = kernel("gelu", "native")(leaf, by_tanh)
        y.sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh" if by_tanh else "none"))
        assert bool(torch.isfinite(leaf.grad).all())
        assert torch.isnan(kernel("gelu", "native")(torch.tensor([float("nan")]), by_tanh)).all()


@native
def test_a_common_offset_of_a_row_costs_layer_norm_one_rounding_of_its_mean() -> None:
    """4096 * 2^-24 of numbers near 1; a mean of squares less a squared mean would be off by 4096^2 * 2^-24 = 1."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) + 4096.0
    w, b = torch.ones(64), torch.zeros(64)
    found = kernel("layer_norm", "native")(x, w, b, 1e-5)
    wanted = kernel("layer_norm", "reference")(x.double(), w.double(), b.double(), 1e-5)
    assert (found - wanted).abs().max() < 4096 * 2.0**-23
