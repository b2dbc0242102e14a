"""The fused rotation: bit-equal to the plain form, values and gradients; put into models and taken out."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.errors import EffectError
from skimp.kernels.apply import Fused
from skimp.kernels.native import library
from skimp.kernels.rotary import fits_native, rotary, rotary_reference
from skimp.kernels.rotary_apply import NAME, FusedRotary, _Exchanged, is_plain

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why() or "native kernels")

#: (rows, heads, seq, dim)
SHAPES = [(1, 1, 1, 2), (2, 3, 5, 6), (3, 9, 37, 64), (1, 2, 130, 34), (2, 4, 1, 8)]


def given(shape: tuple[int, ...], one_row: bool, layout: str) -> tuple[torch.Tensor, ...]:
    rows, heads, seq, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    if layout == "seq first":  # how a projection leaves its heads
        x = torch.randn(rows, seq, heads, dim, generator=generator).transpose(1, 2)
    else:
        x = torch.randn(shape, generator=generator)
    angles = torch.randn(1 if one_row else rows, seq, dim, generator=generator) * 3
    return x, angles.cos(), angles.sin(), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("layout", ["seq first", "heads first"])
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_bit_equal_to_the_plain_form(shape: tuple[int, ...], one_row: bool, layout: str) -> None:
    x, cos, sin, dy = given(shape, one_row, layout)
    assert fits_native(x, cos, sin)
    a, b = x.detach().requires_grad_(), x.detach().requires_grad_()
    y, z = rotary(a, cos, sin), rotary_reference(b, cos, sin)
    assert torch.equal(y, z)
    assert y.stride() == torch.empty_like(x).stride()
    y.backward(dy)
    z.backward(dy)
    assert torch.equal(a.grad, b.grad)


def test_the_gradient_is_right_in_float64() -> None:
    x, cos, sin, dy = (t.double() for t in given((2, 3, 5, 6), False, "seq first"))
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: rotary_reference(v, cos, sin), (x,))
    wanted = torch.autograd.grad(rotary_reference(x, cos, sin), x, dy)[0]
    small = x.detach().float().requires_grad_()
    found = torch.autograd.grad(rotary(small, cos.float(), sin.float()), small, dy.float())[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_threads_do_not_change_a_bit() -> None:
    x, cos, sin, _ = given((2, 9, 257, 64), True, "seq first")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(rotary(x, cos, sin))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    "change",
    [
        lambda x, c, s: (x.double(), c, s),
        lambda x, c, s: (x.bfloat16(), c, s),
        lambda x, c, s: (x[..., ::2], c[..., ::2], s[..., ::2]),
        lambda x, c, s: (x, c[..., :4], s[..., :4]),
        lambda x, c, s: (x, c[:, :1], s[:, :1]),
        lambda x, c, s: (x, c.clone().requires_grad_(), s),
        lambda x, c, s: (x[..., :5], c[..., :5], s[..., :5]),
    ],
)
def test_what_it_does_not_take(change: Any) -> None:
    x, cos, sin, _ = given((2, 3, 5, 6), False, "seq first")
    assert not fits_native(*change(x, cos, sin))


def test_fake_tensors_give_the_shapes_and_strides_of_real_ones() -> None:
    x, cos, sin, _ = given((2, 3, 5, 6), False, "seq first")
    with FakeTensorMode() as mode:
        y = rotary(*(mode.from_tensor(t) for t in (x, cos, sin)))
    real = rotary(x, cos, sin)
    assert (y.shape, y.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize("style", ["llama", "qwen2"])
def test_a_model_is_the_same_function_to_the_bit_and_goes_back(make_tiny: Any, style: str) -> None:
    model, other = make_tiny(style), make_tiny(style)
    file = sys.modules[type(model.model.layers[0].self_attn).__module__]
    gc.collect()  # models that other tests dropped let go
    standing = vars(file)[NAME]
    users = standing.users if isinstance(standing, _Exchanged) else 0
    plain = standing.plain if isinstance(standing, _Exchanged) else standing
    ids = torch.arange(40).view(2, 20)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss, *(p.grad for p in model.parameters())]

    before = gradients()
    first, second = FusedRotary(model), FusedRotary(make_tiny(style))
    assert first.modules == 1
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))
    assert first.runs == len(model.model.layers)
    other(ids, use_cache=False)  # another model of the file
    assert (first.runs, first.plain_runs, second.runs) == (len(model.model.layers), 0, 0)
    first.assert_effect()
    first.remove()
    assert vars(file)[NAME].users == users + 1
    del second
    gc.collect()
    assert vars(file)[NAME] is standing if users else vars(file)[NAME] is plain
    assert all("forward" not in vars(m) for m in model.modules())


def test_a_model_without_rotation_is_left_alone(make_tiny: Any) -> None:
    found = FusedRotary(make_tiny("gpt2"))
    assert found.modules == 0
    found.assert_effect()


def test_another_formula_is_not_exchanged() -> None:
    def interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        def turn(x: torch.Tensor) -> torch.Tensor:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            return x * cos.unsqueeze(unsqueeze_dim) + other * sin.unsqueeze(unsqueeze_dim)

        return turn(q), turn(k)

    def single(x: Any, cos: Any, sin: Any) -> Any:
        return x * cos + sin

    assert not is_plain(interleaved)
    assert not is_plain(single)


def test_mutation_rotation_that_runs_plain_is_named(make_tiny: Any) -> None:
    model = make_tiny("llama")
    fused = Fused(model)
    assert fused.rotary is not None
    fused.rotary._changed.pop().__dict__.pop("forward")
    model(torch.arange(8).view(1, 8), use_cache=False)
    with pytest.raises(EffectError, match="0 applications ran fused"):
        fused.assert_effect()
    fused.remove()
