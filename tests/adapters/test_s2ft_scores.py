"""Scores of heads and channels against what autograd and hooks of a plain model say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skimp.adapters.s2ft import S2FT
from skimp.adapters.s2ft_scores import measured
from skimp.adapters.s2ft_select import S2FTSpec
from skimp.core.codecs import NF4
from skimp.core.coded_model import encode_model
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.structure import read_structure

BATCHES = [torch.arange(1, 25).view(2, 12), torch.arange(30, 46).view(1, 16)]


def loss_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_scores_are_norms_of_the_dense_gradients(make_tiny: Callable[..., Any], family: str) -> None:
    model = make_tiny(family)
    asked = [p.requires_grad for p in model.parameters()]
    found = measured(model, S2FTSpec(v=0.5, o=0.5, d=0.1, select="gradient"), BATCHES, loss_of(model))
    assert asked == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    squares: dict[str, torch.Tensor] = {}
    for batch in BATCHES:
        model.zero_grad()
        loss_of(model)(batch).backward()
        for name in found:
            grad = model.get_submodule(name).weight.grad
            grad = grad.t() if family == "gpt2" else grad
            if name.endswith(("v_proj", "c_attn")):
                here = grad[-found[name].numel() * 16 :].reshape(-1, 16 * 64).square().sum(1)
            elif name.endswith(("o_proj", "attn.c_proj")):
                here = grad.reshape(64, 4, 16).square().sum((0, 2))
            else:
                here = grad.square().sum(0)
            squares[name] = squares.get(name, 0) + here
    for name, square in squares.items():
        torch.testing.assert_close(found[name], square.sqrt(), rtol=1e-5, atol=1e-8)


def test_activation_scores_and_products(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    spec = S2FTSpec(o=0.5, u=0.1, d=0.1, select="activation")
    found = measured(model, spec, BATCHES, loss_of(model))
    mlp = model.model.layers[1].mlp
    inputs: list[torch.Tensor] = []
    hook = mlp.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))
    for batch in BATCHES:
        loss_of(model)(batch)
    hook.remove()
    rows = torch.cat([x.reshape(-1, 64) for x in inputs])
    inner = torch.nn.functional.silu(rows @ mlp.gate_proj.weight.t()) * (rows @ mlp.up_proj.weight.t())
    torch.testing.assert_close(found["model.layers.1.mlp.down_proj"], inner.norm(dim=0).detach())
    torch.testing.assert_close(
        found["model.layers.1.mlp.up_proj"], (rows @ mlp.up_proj.weight.t()).norm(dim=0).detach()
    )
    both = measured(model, S2FTSpec(d=0.1, select="product"), BATCHES, loss_of(model))
    torch.testing.assert_close(
        both["model.layers.1.mlp.down_proj"], (inner.norm(dim=0) * mlp.down_proj.weight.norm(dim=0)).detach()
    )
    handle = S2FT(model, spec, scores=found)
    best = found["model.layers.1.mlp.down_proj"].argsort(descending=True)[:16].sort().values.tolist()
    assert handle.slices["model.layers.1.mlp.down_proj"].index == tuple(best)


def test_nothing_to_measure_is_refused(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    with pytest.raises(SkimpError, match="it needs none"):
        measured(model, S2FTSpec(d=0.1), BATCHES, loss_of(model))
    with pytest.raises(SkimpError, match="no batch"):
        measured(model, S2FTSpec(d=0.1, select="activation"), [], loss_of(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("select", ["activation", "product", "gradient"])
def test_what_waits_for_text_ends_as_what_was_measured_before(
    make_tiny: Callable[..., Any], select: Any, permuted: bool, family: str
) -> None:
    asked = {"name": "s2ft", "o": 0.5, "d": 0.1, "select": select, "permute": permuted, "batches": 2}
    model, plain = make_tiny(family), make_tiny(family)
    before = loss_of(model)(BATCHES[0]).detach()
    waiting = S2FT.attach(model, read_structure(model), asked, 0)
    assert waiting.waits
    parameters = [id(p) for p in waiting.parameters()]
    with pytest.raises(ConflictError, match=r"not chosen yet[\s\S]*skimp train"):
        loss_of(model)(BATCHES[0])
    with pytest.raises(SkimpError, match="no batch"):
        waiting.look([], loss_of(model), loss_of(model))
    waiting.look(BATCHES, loss_of(model), loss_of(model))
    assert not waiting.waits
    assert [id(p) for p in waiting.parameters()] == parameters
    assert all(p.grad is None for p in model.parameters())
    spec = S2FTSpec(o=0.5, d=0.1, select=select, permute=permuted)
    direct = S2FT(plain, spec, scores=measured(plain, spec, BATCHES, loss_of(plain)))
    assert {n: (s.side, sorted(s.index)) for n, s in waiting.slices.items()} == {
        n: (s.side, sorted(s.index)) for n, s in direct.slices.items()
    }
    torch.testing.assert_close(loss_of(model)(BATCHES[0]).detach(), before, rtol=1e-5, atol=1e-6)
    # The same numbers get the same gradients, and a new model takes the choice over from what a checkpoint says.
    for one, handle in ((model, waiting), (plain, direct)):
        loss_of(one)(BATCHES[1]).backward()
        assert all(p.grad is not None for p in handle.parameters())
    for (name, mine), (_, theirs) in zip(waiting.named_parameters(), direct.named_parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
    third = make_tiny(family)
    again = S2FT.attach(third, read_structure(third), asked, 0)
    again.adopt(waiting.meta())
    assert not again.waits
    assert again.slices == waiting.slices
    assert all(torch.equal(a, b) for a, b in zip(again.additions(), waiting.additions(), strict=True))
    waiting.detach()
    fresh = make_tiny(family)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))


def test_a_coded_base_has_activations_and_no_gradients(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    structure = read_structure(model)
    encode_model(model, structure, NF4())
    asked = {"name": "s2ft", "o": 0.5, "d": 0.1, "select": "gradient"}
    waiting = S2FT.attach(model, structure, asked, 0)
    with pytest.raises(ConflictError, match=r"codes have no gradient[\s\S]*select=activation"):
        waiting.look(BATCHES, loss_of(model), loss_of(model))
    waiting.detach()
    waiting = S2FT.attach(model, structure, {**asked, "select": "product"}, 0)
    waiting.look(BATCHES, loss_of(model), loss_of(model))
    assert not waiting.waits


def test_a_gradient_of_one_layer_exists_at_a_time(make_tiny: Callable[..., Any]) -> None:
    model = make_tiny("llama")
    spec = S2FTSpec(d=0.1, select="gradient")
    held: list[int] = []
    layers = [m for n, m in model.named_modules() if n.endswith("down_proj")]
    hooks = [
        m.weight.register_hook(lambda grad: held.append(sum(x.weight.grad is not None for x in layers))) for m in layers
    ]
    measured(model, spec, BATCHES, loss_of(model))
    for hook in hooks:
        hook.remove()
    assert held == [0] * (len(layers) * len(BATCHES))
