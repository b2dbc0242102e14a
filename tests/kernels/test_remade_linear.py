"""A linear layer that makes its input again: F.linear to the bit, less memory, gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from skimp.core.memory.tracker import Tracker
from skimp.core.remake import Remake, can_be_remade
from skimp.kernels.remade_linear import linear, remade_linear


def double(source: Tensor) -> Tensor:
    return source.detach() * 2.0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (1, 5)])
def test_values_and_gradients_are_those_of_the_plain_layer_to_the_bit(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    source = torch.randn(shape, generator=generator)
    results = []
    for remade in (True, False):
        layer = nn.Linear(5, 11, bias=bias)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.dim())))
        x = double(source).requires_grad_()
        made = Remake(double, (source,))
        y = remade_linear(x, layer.weight, layer.bias, made) if remade else nn.functional.linear(x, *layer.parameters())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_every_gradient_in_float64() -> None:
    generator = torch.Generator().manual_seed(4)
    source, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,))
    )

    def call(source: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return remade_linear(source * 2.0, weight, bias, Remake(double, (source.detach(),)))

    assert torch.autograd.gradcheck(call, (source, weight, bias))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_input_is_not_kept_where_it_can_be_made(frozen: bool) -> None:
    weight = torch.ones(3, 1 << 16, requires_grad=not frozen)
    source = torch.ones(4, 1 << 16)
    held = {}
    for noted in (True, False):
        with Tracker() as tracker:
            tracker.hold([weight, source], "weights")
            x = double(source)
            y = linear(can_be_remade(x, double, source) if noted else x, weight, None)
            del x
            held[noted] = tracker.live
        del y
    assert held[False] - held[True] == (0 if frozen else 4 * (1 << 16) * 4)
