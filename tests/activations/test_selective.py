"""Selective recompute: the same bits; what was dear is made once; what is kept is counted; changed results are seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skimp.activations.recompute import Recompute
from skimp.activations.selective import dear
from skimp.core import attention
from skimp.core.errors import EffectError, ModelError
from skimp.core.memory.tracker import Tracker

NAMES = ("model.layers.0", "model.layers.1")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def stepped(make_tiny: Callable[..., Any], style: str, keep: Any, documents: Any = None) -> tuple[Any, Any, Any]:
    """Gradients, operator counts and the wrapper of one forward and backward; `keep` None wraps nothing."""
    model = make_tiny(style)
    model.set_attn_implementation(attention.register())
    blocks = [n for n, m in model.named_modules() if type(m).__name__ in ("LlamaDecoderLayer", "GPT2Block")]
    wrapped = Recompute(model, blocks, keep=keep) if keep is not None else None
    ids = torch.arange(22).reshape(2, 11)
    counted = Counted()
    with counted:
        with attention.declared(documents):
            hidden = model(input_ids=ids, position_ids=torch.arange(11).expand(2, -1), use_cache=False).logits
        hidden.square().sum().backward()
    return [p.grad for p in model.parameters()], counted.calls, wrapped


@pytest.mark.parametrize("style", ["llama", "gpt2"])
@pytest.mark.parametrize("documents", [None, ((0, 4, 5, 11), (0, 11))])
@pytest.mark.parametrize("keep", ["attention", "products"])
def test_gradients_are_bit_equal_and_attention_runs_once(
    make_tiny: Callable[..., Any], style: str, documents: Any, keep: str
) -> None:
    plain, once, _ = stepped(make_tiny, style, None, documents)
    found, calls, wrapped = stepped(make_tiny, style, keep, documents)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert calls[FLASH] == once[FLASH] > 0
    assert calls["aten::cos"] <= once["aten::cos"]  # angles are made outside the blocks
    wrapped.assert_effect(1)


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_products_are_made_once_and_attention_alone_makes_them_twice(make_tiny: Callable[..., Any], style: str) -> None:
    def products(keep: Any) -> int:
        calls = stepped(make_tiny, style, keep)[1]
        return sum(n for name, n in calls.items() if name in ("aten::mm", "aten::addmm"))

    assert products(None) == products("products") < products("attention") <= products("nothing")


def test_bytes_lie_between_recompute_and_keeping_everything(make_tiny: Callable[..., Any]) -> None:
    """Kept besides the input: attention, its output and log-sum-exp; nothing else."""
    rows, seq, width, heads = 2, 11, 64, 4

    def held(keep: Any) -> int:
        model = make_tiny("llama")
        model.set_attn_implementation(attention.register())
        if keep is not None:
            Recompute(model, NAMES, keep=keep)
        with Tracker() as tracker:
            tracker.hold(model.parameters(), "weights")
            rest = tracker.live
            out = model.model(input_ids=torch.zeros(rows, seq, dtype=torch.int64), use_cache=False).last_hidden_state
            live = tracker.live - rest
            del out
            return live

    assert held("nothing") < held("attention") < held("products") < held(None)
    assert held("attention") - held("nothing") == len(NAMES) * 4 * rows * seq * (width + heads)


class Changed(nn.Module):
    """Writes over the output of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        product = self.a(x)
        product.add_(1.0)
        return self.b(torch.sin(product)).sin()  # type: ignore[no-any-return]


def test_a_result_that_its_block_writes_over_is_made_again() -> None:
    torch.manual_seed(3)
    net, x = nn.Sequential(Changed()).train(), torch.randn(5, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    wrapped = Recompute(net, ("0",), keep="products")
    (found,) = torch.autograd.grad(net(x).sum(), x)
    assert torch.equal(found, expected)
    assert wrapped.taken == {"0": 0}  # the other product is the last one


class Shared(nn.Module):
    """Shows a product to the outside, so that somebody else can write over it."""

    shown: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.a(x)
        return self.b(self.shown.sin()).sin()  # type: ignore[no-any-return]


def test_a_result_written_over_after_its_block_is_refused_not_used() -> None:
    block = Shared()
    net = nn.Sequential(block).train()
    Recompute(net, ("0",), keep="products")
    out = net(torch.randn(5, 6)).sum()
    with torch.no_grad():
        block.shown.detach().mul_(2.0)
    with pytest.raises(ModelError, match="changed in place"):
        out.backward()


def test_a_graph_gone_through_twice_makes_everything_again_the_second_time(make_tiny: Callable[..., Any]) -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))).train()
    wrapped = Recompute(net, ("0",), keep="products")
    x = torch.randn(5, 6, requires_grad=True)
    loss = net(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert wrapped.taken == {"0": 1}


def test_a_block_without_attention_has_no_effect_and_says_so() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))).train()
    wrapped = Recompute(net, ("0",), keep="attention")
    net(torch.randn(5, 6)).sum().backward()
    with pytest.raises(EffectError, match="keeps attention"):
        wrapped.assert_effect(1)


@pytest.mark.parametrize(
    ("name", "keep", "kept"),
    [
        (FLASH, "attention", True),
        (FLASH + "_backward", "products", False),
        ("aten::mm", "attention", False),
        ("aten::mm", "products", True),
        (FLASH, "nothing", False),
    ],
)
def test_which_operators_are_dear(name: str, keep: Any, kept: bool) -> None:
    assert dear(name, keep) is kept
