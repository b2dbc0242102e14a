"""Weights that train in codes: gradients are those of the decoded weight, and nothing dense stands for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.codecs import NF4, Int8
from skimp.core.coded_linear import CodedLinear
from skimp.core.coded_trained import codes_of, decoded, put, stand_ins, stored, train_codes
from skimp.core.errors import SkimpError
from skimp.core.remake import can_be_remade


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def net(dtype: torch.dtype = torch.float64, codec: Any = None, bias: bool = True) -> nn.Sequential:
    layers = []
    for i, (inputs, outputs) in enumerate(((13, 37), (37, 7))):
        made = CodedLinear(inputs, outputs, codec or Int8(16), bias=bias, dtype=dtype)
        made.take(normal(outputs, inputs, seed=i))
        if made.bias is not None:
            made.bias.data.copy_(normal(outputs, seed=9))
        layers.append(made)
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    return model


def plain(model: nn.Sequential) -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(m.in_features, m.out_features) if i != 1 else m for i, m in enumerate(model)))
    made.to(next(iter(model.parameters())).dtype)
    for ours, theirs in ((model[0], made[0]), (model[2], made[2])):
        theirs.weight.data.copy_(ours.weight.dense())
        theirs.bias.data.copy_(ours.bias.data)
    return made


@pytest.mark.parametrize("shape", [(5, 13), (2, 3, 13), (1, 13)])
@pytest.mark.parametrize("compact", [False, True])
def test_every_gradient_is_that_of_the_decoded_weights(shape: tuple[int, ...], compact: bool) -> None:
    model = net()
    assert train_codes(model) == ["0", "2"]
    expected = plain(model)
    factors: dict[int, Tensor] = {}
    if compact:
        for module in (model[0], model[2]):
            module.trained.receive = lambda p, left, right: factors.update({id(p): left.t() @ right})
    x = normal(*shape, seed=4)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = model(ours), expected(theirs)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    for name, p in stand_ins(model):
        found = factors[id(p)] if compact else p.grad
        assert found is not None
        assert compact == (p.grad is None)
        torch.testing.assert_close(found, expected.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
        bias = name.replace("weight", "bias")
        torch.testing.assert_close(
            model.get_parameter(bias).grad, expected.get_parameter(bias).grad, rtol=1e-12, atol=1e-12
        )


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_weights() -> None:
    model = net(torch.float32)
    train_codes(model)
    expected = plain(model)
    x = normal(6, 13, seed=5, dtype=torch.float32)
    for made in (model, expected):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = made(x)
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    for name, p in stand_ins(model):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, expected.get_parameter(name).grad, rtol=2e-2, atol=2e-2)


def test_an_input_that_can_be_made_again_is_not_kept() -> None:
    model = net()
    train_codes(model)
    x = normal(5, 13, seed=6)
    kept: list[Tensor] = []

    def run(remade: bool) -> Tensor:
        kept.clear()
        source = x.clone()
        seen = can_be_remade(source * 2, lambda t: t * 2, source) if remade else source * 2
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = model[0](seen)
        y.sum().backward()
        assert (kept[0].data_ptr() == source.data_ptr()) == remade
        grad: Tensor = model[0].trained.stand_in.grad.clone()
        model[0].trained.stand_in.grad = None
        return grad

    assert torch.equal(run(True), run(False))


def test_a_stand_in_holds_one_number_and_reading_or_writing_it_is_seen() -> None:
    model = net(torch.float32)
    train_codes(model)
    (name, p), _ = stand_ins(model)
    assert name == "0.weight"
    assert (tuple(p.shape), p.untyped_storage().nbytes()) == ((37, 13), 4)
    assert codes_of(p) is model[0]
    assert p.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        p.add_(1.0)
    assert [n for n, _ in model.named_parameters()] == ["0.bias", "2.bias"]
    assert [n for n, _ in stored(model)][2:] == [f"{i}.weight_{k}" for i in (0, 2) for k in ("codes", "scale")]


def test_decoded_and_put_are_each_others_inverse() -> None:
    model = net(torch.float32)
    train_codes(model)
    module = model[0]
    w = decoded(module)
    assert w.dtype == torch.float32
    assert torch.equal(w, module.weight.dense(torch.float32))
    put(module, w * 3, 0, "w", 1)  # a new grid, with a short scale
    held = decoded(module)
    put(module, held, 0, "w", 2)
    assert torch.equal(decoded(module), held)
    assert ((held - w * 3).abs() <= module.parts()["scale"].max()).all()


def test_frozen_codecs_copies_and_second_calls() -> None:
    model = net(torch.float32, NF4())
    with pytest.raises(SkimpError, match=r"(?s)codec 'nf4'.*codec int8"):
        train_codes(model)
    model = net(torch.float32)
    train_codes(model)
    first = [p for _, p in stand_ins(model)]
    train_codes(model)
    assert all(a is b for a, (_, b) in zip(first, stand_ins(model), strict=True))
    other = copy.deepcopy(model)
    assert not list(stand_ins(other))  # frozen: its stand-ins would be those of the first
    x = normal(3, 13, dtype=torch.float32)
    assert torch.equal(other(x), model(x))
