"""Recompute: the same bits, fewer bytes; in the context of the forward; refused effect when it does
nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.activations.recompute import Recompute, choose
from skimp.core.errors import EffectError
from skimp.core.memory.tracker import Tracker

WORD: ContextVar[str] = ContextVar("test_word", default="outside")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.words: list[str] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.words.append(WORD.get())
        return x + self.down(nn.functional.silu(self.up(x))) * scale


def blocks(count: int = 3, width: int = 10) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block(width) for _ in range(count))).train()


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize("wrapped", [("0",), ("1",), ("0", "2"), ("0", "1", "2")])
def test_gradients_are_bit_equal(wrapped: tuple[str, ...]) -> None:
    x = torch.randn(7, 10)
    plain, net = blocks(), blocks()
    recompute = Recompute(net, wrapped)
    expected, found = gradients(plain, x), gradients(net, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    recompute.assert_effect(1)
    assert recompute.runs == dict.fromkeys(wrapped, 2)


def test_keeps_a_blocks_input_only() -> None:
    x = torch.randn(7, 10)

    def kept(net: nn.Module) -> int:
        with Tracker() as tracker:
            tracker.hold([x, *net.parameters()], "weights")
            rest = tracker.live
            out = net(x)
            live = tracker.live - rest
            del out
            return live

    plain, net = blocks(), blocks()
    Recompute(net, ("0", "1", "2"))
    row = 7 * 10 * 4
    # A block keeps up's output and silu's (4 rows each) and the factor; its input is the output of the one
    # before.
    assert kept(plain) >= 3 * (8 * row + row)
    # The factor, a Python number, is 8 bytes that recompute keeps too.
    assert kept(net) == 3 * (row + 8)


def test_second_run_sees_the_context_of_the_first() -> None:
    """Document boundaries are declared around the forward only, and backward comes after."""
    net = blocks(2)
    Recompute(net, ("0", "1"))
    token = WORD.set("declared")
    loss = net(torch.randn(3, 10)).sum()
    WORD.reset(token)
    loss.backward()
    assert [block.words for block in net] == [["declared"] * 2] * 2  # type: ignore[union-attr]


def test_packed_documents_are_recomputed_as_packed(make_tiny: Callable[..., Any]) -> None:
    """The whole path: a tiny model on packed rows, gradients with and without recompute to the bit."""
    from skimp.core import attention

    found = []
    for wrapped in (False, True):
        model = make_tiny("llama")
        model.set_attn_implementation(attention.register())
        if wrapped:
            Recompute(model, ("model.layers.0", "model.layers.1"))
        ids = torch.arange(20).reshape(1, 20)
        positions = torch.cat([torch.arange(8), torch.arange(12)]).unsqueeze(0)
        with attention.declared(((0, 8, 20),)):
            loss = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state.square().sum()
        loss.backward()
        found.append([p.grad for p in model.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_evaluation_and_frozen_blocks_are_left_alone() -> None:
    net = blocks()
    recompute = Recompute(net, ("0", "1"))
    with torch.no_grad():
        net(torch.randn(2, 10))
    net.eval()
    net(torch.randn(2, 10)).sum().backward()
    assert set(recompute.runs.values()) == {0}
    net.train().requires_grad_(False)
    net(torch.randn(2, 10))
    assert set(recompute.runs.values()) == {0}
    with pytest.raises(EffectError, match=r"not run again in backward: 0, 1"):
        recompute.assert_effect(1)


def test_keyword_arguments_and_inputs_that_need_gradients_pass_through() -> None:
    net = blocks(1).requires_grad_(False)
    x = torch.randn(4, 10, requires_grad=True)
    (expected,) = torch.autograd.grad(net[0](x, scale=0.25).sum(), x)
    recompute = Recompute(net, ("0",))
    (found,) = torch.autograd.grad(net[0](x, scale=0.25).sum(), x)
    assert torch.equal(found, expected)
    assert recompute.runs == {"0": 2}


def test_remove_gives_the_blocks_their_own_forward_back() -> None:
    net = blocks()
    recompute = Recompute(net, ("0",))
    assert "forward" in net[0].__dict__
    recompute.remove()
    assert "forward" not in net[0].__dict__
    gradients(net, torch.randn(2, 10))
    assert recompute.runs == {"0": 0}


def test_choose_takes_the_first_blocks() -> None:
    assert choose(2, 5) == (0, 1)
    assert choose(9, 3) == (0, 1, 2)
    assert choose(0, 3) == ()
