"""A linear layer that makes its input again: F.linear to the bit, less memory, gradients in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.memory.tracker import Tracker
from skimp.core.remake import Again, Remake, can_be_remade, how_made
from skimp.kernels.remade_linear import linear, linear_in_out, remade_linear


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
        made = Remake(Again(double), (source,))
        y = remade_linear(x, layer.weight, layer.bias, made) if remade else nn.functional.linear(x, *layer.parameters())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_weight_stored_the_other_way_round_is_gpt2s_layer_to_the_bit(accumulate: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    generator = torch.Generator().manual_seed(3)
    source, up = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 11, generator=generator)
    results = []
    for ours in (True, False):
        torch.manual_seed(1)
        layer = Conv1D(11, 5)
        x = double(source).requires_grad_()
        y = linear_in_out(can_be_remade(x, double, source), layer.weight, layer.bias, accumulate) if ours else layer(x)
        y.backward(up)
        results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_every_gradient_in_float64() -> None:
    generator = torch.Generator().manual_seed(4)
    source, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (4, 5), (4,))
    )

    def call(source: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return remade_linear(source * 2.0, weight, bias, Remake(Again(double), (source.detach(),)))

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


def test_an_input_of_three_readers_is_made_once_a_backward_and_let_go() -> None:
    calls = []

    def counted(source: Tensor) -> Tensor:
        calls.append(1)
        return double(source)

    source = torch.randn(6, 5, requires_grad=True)
    weights = [torch.randn(4, 5, requires_grad=True) for _ in range(3)]
    x = can_be_remade(source * 2.0, counted, source)
    total = sum(linear(x, w, None).square().sum() for w in weights)
    for turn in (1, 2):  # a retained graph asks again
        total.backward(retain_graph=turn == 1)
        assert len(calls) == turn
    made = how_made(x)
    assert made is not None
    assert made.again._made is None
    wanted = 2 * sum(2 * (x.detach() @ w.detach().t()).t() @ x.detach() for w in weights[:1])
    torch.testing.assert_close(weights[0].grad, wanted)


def watched(weight: Tensor, seen: list[Any]) -> Any:
    """Notes what autograd is handed for a weight, unknown to the layer; as long as what is returned lives."""
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: seen.append(grads[0]))
    return node


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_gradient_is_added_inside_the_product(noted: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, bias, *sources = (
        torch.randn(s, generator=generator, dtype=dtype) for s in ((11, 5), (11,), (2, 3, 5), (2, 3, 5), (2, 3, 5))
    )
    plain, ours = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    biases = [nn.Parameter(bias.clone()) for _ in range(2)]
    seen = []
    node = watched(ours, seen)  # noqa: F841
    for source in sources:
        nn.functional.linear(double(source), plain, biases[0]).square().sum().backward()
        held = ours.grad
        x = double(source).requires_grad_()
        x = can_be_remade(x, double, source) if noted else x
        linear(x, ours, biases[1], accumulate=True).square().sum().backward()
        assert held is None or ours.grad is held
    assert len([grad for grad in seen if grad is not None]) == 1  # autograd was handed one, and added none
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0)
    assert torch.equal(biases[0].grad, biases[1].grad)


def test_a_bfloat16_gradient_is_added_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    seen = []
    node = watched(weight, seen)  # noqa: F841
    for _ in range(2):
        linear(torch.ones(2, 4, dtype=torch.bfloat16), weight, None, accumulate=True).sum().backward()
    assert len([grad for grad in seen if grad is not None]) == 2


@pytest.mark.parametrize("hooked", ["recompute", "hooks"])
def test_it_adds_where_the_gradient_lies_also_under_hooks_on_saved_tensors(hooked: str) -> None:
    """Recompute and offload hand back aliases of what was kept, which hold no gradient."""
    from torch.utils.checkpoint import checkpoint

    weight, seen, calls = nn.Parameter(torch.randn(7, 5)), [], [0, 0]
    node = watched(weight, seen)  # noqa: F841
    layer = lambda x: linear(x, weight, None, accumulate=True).tanh()
    for micro_batch in range(2):
        x, held = torch.randn(3, 5, requires_grad=True), weight.grad
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked == "hooks" else nullcontext():
            y = checkpoint(layer, x, use_reentrant=False) if hooked == "recompute" else layer(x)
        y.sum().backward()
        calls[micro_batch] = len([grad for grad in seen if grad is not None])
        assert held is None or weight.grad is held
    assert calls == [1, 1], "autograd was handed the second gradient and added it"


def test_a_weight_with_a_hook_shows_it_every_gradient() -> None:
    weight, seen = nn.Parameter(torch.ones(3, 4)), []
    weight.register_hook(seen.append)
    for _ in range(2):
        linear(torch.ones(2, 4), weight, None, accumulate=True).sum().backward()
    assert [grad.tolist() for grad in seen] == [[[2.0] * 4] * 3] * 2
    assert weight.grad is not None
    assert weight.grad.tolist() == [[4.0] * 4] * 3
