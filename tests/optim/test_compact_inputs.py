"""CompAct: layers keep a projection of their inputs. Outputs and all other gradients are exact, the weight's is the
exact one seen through P, and the rule's weights are those of whole gradients projected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skimp.core.errors import RecipeError, SkimpError
from skimp.core.structure import input_name, is_attention_output
from skimp.optim import AdamW, CompAct, project_backward
from skimp.optim.compact_inputs import Inputs
from skimp.optim.stages import Place
from skimp.recipe import load_recipe

WIDE, TALL = 20, 36


class Block(nn.Module):
    """The linear layers of a block by their usual names; three read one tensor, two another."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDE, WIDE, bias=bias, dtype=dtype))
        for name in ("gate_proj", "up_proj"):
            setattr(self, name, nn.Linear(WIDE, TALL, bias=bias, dtype=dtype))
        self.down_proj = nn.Linear(TALL, WIDE, bias=bias, dtype=dtype)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x)

    def inside(self, x: Tensor) -> Tensor:
        mixed = torch.softmax(self.q_proj(x) @ self.k_proj(x).transpose(-1, -2), -1) @ self.v_proj(x)
        x = torch.tanh(self.o_proj(mixed))
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


def inputs(step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, WIDE, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def rule_of(net: nn.Module, **options: Any) -> CompAct:
    return CompAct(list(net.named_parameters()), **{"lr": 1e-2, "rank": 0.25, "refresh": 3, **options})


@pytest.mark.parametrize("shape", [(7,), (3, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_the_layers_own_and_only_weights_gradients_are_seen_through_p(
    shape: tuple[int, ...], bias: bool
) -> None:
    """To the bit forwards; gradients of inputs and biases as autograd has them; also where the input needs none."""
    plain, net = Block(bias=bias), Block(bias=bias)
    rule = rule_of(net)
    x, y = (inputs(1, *shape).requires_grad_() for _ in range(2))
    expected = plain(x)
    with project_backward(net, rule) as layers:
        found = net(y)
        assert torch.equal(found, expected)
        found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
    assert sorted(layers) == sorted(f"{n}_proj" for n in ("q", "k", "v", "gate", "up", "down"))
    for name, p in plain.named_parameters():
        mine = dict(net.named_parameters())[name]
        if not name.endswith("weight") or name == "o_proj.weight":
            torch.testing.assert_close(mine.grad, p.grad, rtol=1e-12, atol=1e-12)
            continue
        place = rule._place_of(mine, name, 1)
        projection = rule.stages.projector.drawn({"refreshed": 1}, place, mine)
        assert mine.grad is None
        torch.testing.assert_close(rule._added[mine].t(), p.grad @ projection, rtol=1e-11, atol=1e-11)
    first = Block(bias=bias)
    rule = rule_of(first)
    with project_backward(first, rule):
        first(inputs(1, *shape)).sum().backward()
    assert first.q_proj.weight in rule._added


@pytest.mark.parametrize("draw", ["normal", "signs"])
@pytest.mark.parametrize(("micro", "again", "share"), [(1, False, True), (1, True, True), (3, False, False)])
def test_weights_are_those_of_whole_gradients_projected(draw: Any, micro: int, again: bool, share: bool) -> None:
    """GaLore with the same random projector on the input side, over three draws of it; micro-batches add up."""
    nets = []
    for compact in (True, False):
        net = Block(again=again)
        rule = rule_of(net, draw=draw, share=share, compact=compact, weight_decay=0.1)
        for step in range(7):
            rule.zero_grad()
            for i in range(micro):
                if compact:
                    with project_backward(net, rule):
                        net(inputs(10 * step + i, 2, 5)).square().mean().backward()
                        assert net.up_proj.weight.grad is None
                else:
                    net(inputs(10 * step + i, 2, 5)).square().mean().backward()
            rule.step()
        assert rule.state[net.q_proj.weight]["refreshed"] == 7
        nets.append(net)
    for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_with_the_identity_for_p_it_is_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost then, and what is left is Adam's arithmetic, on transposed matrices."""
    monkeypatch.setattr(Inputs, "saves", False)  # so that a P with as many columns as rows is taken
    monkeypatch.setattr(Inputs, "drawn", lambda self, state, place, like: torch.eye(place.rows, dtype=like.dtype))
    net, plain = Block(), Block()
    rule = rule_of(net, rank=0.9999, scale=1.0, output_scale=1.0, weight_decay=0.1)
    assert rule.rank_of(net.down_proj.weight) == TALL
    other = AdamW(list(plain.named_parameters()), lr=1e-2, weight_decay=0.1)
    for step in range(4):
        with project_backward(net, rule) as layers:
            net(inputs(step, 2, 5)).square().mean().backward()
            rule.step()
        assert len(layers) == 6
        rule.zero_grad()
        plain(inputs(step, 2, 5)).square().mean().backward()
        other.step()
        other.zero_grad()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("draw", "law"), [("normal", 17), ("signs", 15)])
def test_the_lifted_gradient_is_without_bias_by_its_law(draw: Any, law: int) -> None:
    """The mean over K draws is off by √((n + 1) / (r·K)) of the gradient's norm, √((n - 1) / (r·K)) with signs, n = 16;
    and the norm of the projected gradient is right in the mean square."""
    n, r, draws = 16, 8, 2000
    gradient = torch.randn(n, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    projector, total, squares = Inputs(draw=draw), torch.zeros_like(gradient), 0.0
    for i in range(draws):
        place = Place("a.q_proj.weight", 1, r, n, 5, {"seed": i})
        small = projector.project(gradient, {"refreshed": 1}, place)
        total += projector.lift(small, {"refreshed": 1}, place)
        squares += float(small.square().sum())
    error = float((total / draws - gradient).norm() / gradient.norm())
    assert error == pytest.approx(math.sqrt(law / (r * draws)), rel=0.15)
    assert squares / draws == pytest.approx(float(gradient.square().sum()), rel=0.03)


def kept_bytes(net: nn.Module, x: Tensor) -> int:
    """Bytes of distinct storages that autograd keeps and that are no parameter's."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    found: dict[int, int] = {}
    held = []

    def pack(t: Tensor) -> Tensor:
        held.append(t)
        if t.untyped_storage().data_ptr() not in own:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x).sum().backward()
    return sum(found.values())


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("part", [0.5, 0.25])
def test_kept_bytes_are_the_formulas(share: bool, part: float) -> None:
    """Of t tokens: q, k and v keep one t·r, gate and up another (three and two unshared), down t·r of its own inputs.
    One input of width n and one of width m_ff are gone; the tanh before gate and up keeps the other."""
    t = 30
    plain, net = Block(torch.float32), Block(torch.float32)
    rule = rule_of(net, rank=part, share=share)
    with project_backward(net, rule):
        found = kept_bytes(net, inputs(0, t, dtype=torch.float32))
    before = kept_bytes(plain, inputs(0, t, dtype=torch.float32))
    n, r, wide = WIDE, round(part * WIDE), round(part * TALL)
    inputs_of = 2 if share else 5
    assert before - found == 4 * t * (n + TALL - inputs_of * r - wide)


def test_an_input_is_let_go_of_and_torchs_generator_is_left_alone() -> None:
    net = Block(torch.float32)
    rule = rule_of(net)
    state = torch.get_rng_state()
    with project_backward(net, rule):
        net(inputs(0, 9, dtype=torch.float32)).sum().backward()
        rule.step()
    assert torch.equal(torch.get_rng_state(), state)
    with project_backward(net, rule), torch.no_grad():
        assert not net(inputs(0, 9, dtype=torch.float32)).requires_grad
    net.q_proj.weight.requires_grad_(False)
    with project_backward(net, rule):
        net(inputs(0, 9, dtype=torch.float32)).sum().backward()
    assert net.q_proj.weight not in rule._added
    assert net.k_proj.weight in rule._added


def test_a_tensor_changed_in_place_between_two_readers_is_projected_again() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = (nn.Linear(8, 16, dtype=torch.float64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            first = self.q_proj(x)
            return first + self.k_proj(x.mul_(3.0))

    net = Two()
    rule = CompAct(list(net.named_parameters()), lr=1e-2, rank=4)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with project_backward(net, rule):
        net(x).sum().backward()
    torch.testing.assert_close(rule._added[net.k_proj.weight], 3 * rule._added[net.q_proj.weight])


def test_which_layers_and_which_names() -> None:
    assert input_name("model.layers.0.self_attn.v_proj") == input_name("model.layers.0.self_attn.q_proj")
    assert input_name("model.layers.0.mlp.up_proj") == input_name("model.layers.0.mlp.gate_proj")
    assert input_name("model.layers.0.mlp.down_proj") == "model.layers.0.mlp.down_proj"
    assert is_attention_output("model.layers.0.self_attn.o_proj")
    assert is_attention_output("transformer.h.0.attn.c_proj")
    assert not is_attention_output("transformer.h.0.mlp.c_proj")


def test_attentions_output_moves_at_its_part_of_the_rate() -> None:
    """Adam's first step is the rate itself, whatever the gradient."""
    net = Block()
    rule = rule_of(net, lr=1e-3, output_scale=0.125)
    before = net.o_proj.weight.detach().clone()
    with project_backward(net, rule):
        net(inputs(0, 9)).square().sum().backward()
        rule.step()
    assert float((net.o_proj.weight.detach() - before).abs().max()) == pytest.approx(1.25e-4, rel=1e-3)
    assert rule.rule_for(net.o_proj.weight) == "adamw (0.125 of the rate)"
    assert rule.rule_for(net.q_proj.weight) == "compact (rank 5)"


def test_refusals() -> None:
    net = Block()
    for wrong in ({"rank": 0}, {"output_scale": 0.0}, {"policy": "rotate"}):
        with pytest.raises(SkimpError, match=r"compact:"):
            rule_of(net, **wrong)
    with pytest.raises(SkimpError, match=r"compact: rank 36[\s\S]*it has 20 directions"):
        rule_of(net, rank=TALL)

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(8, 16)), None

    columns = nn.Sequential(Conv1D())
    rule = CompAct(list(columns.named_parameters()), lr=1e-2, rank=4)
    with pytest.raises(SkimpError, match=r"outputs as columns[\s\S]*role_groups"), project_backward(columns, rule):
        pass


def test_a_recipe_that_clips_or_adapts_is_refused_with_its_way_out() -> None:
    values: dict[str, Any] = {"model": "tiny", "data": {"train": "pydoc"}, "output": "runs/x", "optimizer": "compact"}
    with pytest.raises(RecipeError, match=r"train\.clip=null[\s\S]*optimizer\.compact=false"):
        load_recipe(values)
    with pytest.raises(RecipeError, match=r"no projection makes smaller"):
        load_recipe({**values, "adapter": "lora", "train": {"clip": None}})
    made = load_recipe({**values, "train": {"clip": None}}, ("optimizer.rank=64",))
    assert made.optimizer.options()["rank"] == 64
    with pytest.raises(RecipeError, match=r"optimizer\.rank"):
        load_recipe({**values, "train": {"clip": None}}, ("optimizer.rank=0",))
