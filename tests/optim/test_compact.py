"""Compact gradients: what the backward gives is the projection of the gradient it never forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import skimp.optim.presets as presets
from skimp.core.errors import EffectError, RecipeError, SkimpError
from skimp.core.memory.tracker import Tracker
from skimp.optim import project_backward
from skimp.recipe import load_recipe

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "galore": (presets.GaLore, {"svd": "random"}),
    "q-galore": (presets.QGaLore, {}),
    "natural-galore": (presets.NaturalGaLore, {"history": 3}),
    "grass": (presets.Grass, {}),
    "grass drawn": (presets.Grass, {"rows": "norm", "replace": True}),
}


class Net(nn.Module):
    """A wide and a tall layer with biases, run again in backward if asked."""

    def __init__(self, dtype: torch.dtype = torch.float64, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.down, self.again = nn.Linear(13, 37, dtype=dtype), nn.Linear(37, 13, dtype=dtype), again

    def forward(self, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

        return checkpoint(both, x, use_reentrant=False) if self.again else both(x)


def batch(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def trained(name: str, compact: bool, again: bool, shape: tuple[int, ...], micro: int = 1) -> Net:
    dtype = torch.float32 if name == "q-galore" else torch.float64
    net = Net(dtype, again)
    cls, options = RULES[name]
    rule = cls(list(net.named_parameters()), rank=3, refresh=4, weight_decay=0.1, **options)
    for step in range(6):
        rule.zero_grad()
        if compact:
            with project_backward(net, rule) as layers:
                for i in range(micro):
                    net(batch(10 * step + i, *shape, 13, dtype=dtype)).square().mean().backward()
                assert layers == ["up", "down"]
                assert net.up.weight.grad is None
                assert net.up.bias.grad is not None
                rule.step()
        else:
            for i in range(micro):
                net(batch(10 * step + i, *shape, 13, dtype=dtype)).square().mean().backward()
            rule.step()
    return net


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("shape", "again"), [((21,), False), ((3, 7), False), ((3, 7), True)])
def test_weights_are_those_of_whole_gradients(name: str, shape: tuple[int, ...], again: bool) -> None:
    """Two and three dimensions, biases, and layers run again; over a change of basis."""
    one, two = trained(name, True, again, shape), trained(name, False, again, shape)
    tolerance = 2e-6 if name == "q-galore" else 1e-11
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_micro_batches_are_added_up() -> None:
    """Between changes of basis; a basis is of the first micro-batch, so all steps here have the first one's."""
    nets = []
    for compact in (True, False):
        net = Net()
        rule = presets.Grass(list(net.named_parameters()), rank=3, refresh=100)
        for step in range(3):
            rule.zero_grad()
            inside = project_backward(net, rule) if compact and step else None
            layers = inside.__enter__() if inside else []
            for i in range(2 if step else 1):
                net(batch(10 * step + i, 9, 13)).square().mean().backward()
            if inside:
                inside.__exit__(None, None, None)
                assert layers
            rule.step()
        nets.append(net)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [presets.Grass, presets.GaLore2])
def test_no_gradient_of_the_weights_size_exists_between_changes_of_basis(cls: Any) -> None:
    net = nn.Linear(300, 500, bias=False)
    rule = cls([("w", net.weight)], rank=5, refresh=100)
    sizes: list[int] = []

    def watch(func: Any, args: Any, out: Any) -> None:
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() != net.weight.untyped_storage().data_ptr():
                sizes.append(t.untyped_storage().nbytes())

    for step in range(2):
        sizes.clear()
        with project_backward(net, rule), Tracker(observer=watch):
            net(batch(step, 8, 300, dtype=torch.float32)).square().sum().backward()
            rule.step()
        assert (max(sizes) >= net.weight.nbytes) == (step == 0)


def test_refusals_and_the_model_is_plain_again() -> None:
    net = Net()
    with (
        pytest.raises(SkimpError, match=r"fira[\s\S]*whole gradient[\s\S]*grass"),
        project_backward(net, presets.Fira(list(net.named_parameters()), rank=3)),
    ):
        pass
    with (
        pytest.raises(SkimpError, match=r"no nn\.Linear"),
        project_backward(nn.ReLU(), presets.Grass(list(net.named_parameters()), rank=3)),
    ):
        pass
    with project_backward(net, presets.Grass(list(net.named_parameters()), rank=3)):
        assert "forward" in vars(net.up)
    assert "forward" not in vars(net.up)


def test_a_recipe_that_clips_or_adapts_is_refused_with_its_way_out() -> None:
    values = {"model": "tiny", "data": {"train": "pydoc"}, "output": "runs/x", "adapter": {"r": 2}}
    with pytest.raises(RecipeError) as caught:
        load_recipe({**values, "optimizer": {"name": "grass", "compact": True}})
    for part in ("train.clip=null", "optimizer.compact=false", "no projection makes smaller"):
        assert part in str(caught.value)
    with pytest.raises(RecipeError, match=r"optimizer\.compact[\s\S]*no such key"):
        load_recipe({**values, "optimizer": {"name": "fira", "compact": True}})
    with pytest.raises(SkimpError, match=r"fira[\s\S]*whole gradient"):
        presets.Fira([("w", nn.Parameter(torch.ones(8, 8)))], rank=1, compact=True)


def test_a_rule_that_asks_for_compact_gradients_and_gets_whole_ones_fails_its_effect() -> None:
    net = Net()
    rule = presets.Grass(list(net.named_parameters()), rank=3, compact=True)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net(batch(1, 9, 13)).square().mean().backward()
    rule.step()
    with pytest.raises(EffectError, match=r"2 of 2 came whole, first down\.weight"):
        rule.assert_effect(before, dict(net.named_parameters()))
