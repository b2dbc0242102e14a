"""Kept tensors in fewer bits: forward untouched, gradients those of the rounded tensors, each storage coded once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from skimp.activations.coded import LEAST, PIECE, Coded
from skimp.core.codecs.affine import Affine
from skimp.core.errors import EffectError, OffloadError, RecipeError
from skimp.core.memory.oracle import witness
from skimp.core.saved import Saved
from skimp.core.tiers import SimulatedDisk
from skimp.recipe import load_recipe

ROWS, TOKENS, WIDTH = 2, 37, 48


@pytest.fixture(autouse=True, scope="module")
def _nothing_left() -> Iterator[None]:
    """Wrapped blocks are cycles: collected here, and not while another test counts what is allocated and freed."""
    yield
    gc.collect()


class Block(nn.Module):
    """Keeps its input for three products and a square; `bend` does something to what was kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(3))
        self.bend = lambda x: x

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states * 2.0
        y = self.q(x) + self.k(x) * self.v(x)
        self.bend(x)
        return hidden_states + y


def net(count: int = 1) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def inputs(rows: int = ROWS) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, TOKENS, WIDTH, generator=g, dtype=torch.float64).requires_grad_()


def rounded(x: Tensor, bits: int = 8) -> Tensor:
    codec, rows = Affine(bits), x.reshape(x.shape[0], -1)
    return torch.stack([codec.decode(codec.encode(r), r.shape, x.dtype) for r in rows]).view(x.shape)


@pytest.mark.parametrize("bits", [8, 4])
def test_forward_is_untouched_and_gradients_are_of_the_rounded_tensors(bits: int) -> None:
    blocks, x = net(), inputs()
    block, upstream = blocks[0], torch.ones(ROWS, TOKENS, WIDTH, dtype=torch.float64)
    want = block(x).detach()
    coded = Coded(blocks, ["0"], 1, bits)
    got = block(x)
    assert torch.equal(got, want)
    found = torch.autograd.grad(got, [block.q.weight, block.v.weight, x], upstream)
    kept, k, v = rounded(2.0 * x.detach(), bits), block.k(2.0 * x.detach()), block.v(2.0 * x.detach())
    k, v = rounded(k, bits), rounded(v, bits)  # the product's factors
    g = upstream.reshape(-1, WIDTH)
    dq, dv = g.T @ kept.view(-1, WIDTH), (g * k.view(-1, WIDTH)).T @ kept.view(-1, WIDTH)
    dx = g + 2 * (
        g @ block.q.weight + (g * v.view(-1, WIDTH)) @ block.k.weight + (g * k.view(-1, WIDTH)) @ block.v.weight
    )
    for a, b in zip(found, (dq, dv, dx.detach().view(x.shape)), strict=True):
        # Affine decodes in float32.
        a = a.detach()
        assert float((a - b).norm() / b.norm()) < 1e-6
    coded.remove()
    assert torch.equal(block(x), want)


def test_error_of_a_kept_number_is_at_most_half_a_step_of_its_group() -> None:
    x = inputs().detach()
    for bits in (8, 4):
        groups = nn.functional.pad((rounded(x, bits) - x).view(ROWS, -1), (0, -TOKENS * WIDTH % 256)).view(-1, 256)
        values = nn.functional.pad(x.view(ROWS, -1), (0, -TOKENS * WIDTH % 256)).view(-1, 256)
        steps = (values.amax(1).clamp_min(0) - values.amin(1).clamp_max(0)) / (2**bits - 1)
        assert bool((groups.abs() <= steps[:, None] * (0.5 + 1e-5)).all())


def test_one_storage_is_coded_once_and_let_go() -> None:
    """The input of three products is kept as three views: its bytes are there once, and its storage is free."""
    blocks, x = net(), inputs()
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    blocks[0].bend = lambda kept: seen.append(weakref.ref(kept.untyped_storage()))
    coded = Coded(blocks, ["0"], 1)
    y = blocks[0](x)
    numbers = ROWS * TOKENS * WIDTH
    assert coded.kept_bytes["0"] == 3 * numbers * 8  # the input, and the two factors of the product
    assert coded.coded_bytes["0"] == 3 * ROWS * Affine(8).nbytes((TOKENS * WIDTH,))
    gc.collect()
    assert seen[0]() is None
    y.sum().backward()
    first = x.grad.clone()  # type: ignore[union-attr]
    x.grad = None
    blocks[0](x).sum().backward()
    assert torch.equal(x.grad, first)  # type: ignore[arg-type]


def test_bytes_held_are_the_codes() -> None:
    blocks, x = net(), inputs()
    Coded(blocks, ["0"], 1)
    y, seen = witness(lambda: blocks[0](x))
    out = y.numel() * 8
    assert seen.held == 3 * ROWS * Affine(8).nbytes((TOKENS * WIDTH,)) + out + 8  # 8: the factor 2.0


def test_micro_batches_give_the_same_gradients_as_all_rows() -> None:
    blocks, x = net(), inputs(4)
    Coded(blocks, ["0"], 1)
    whole = torch.autograd.grad(blocks[0](x).sum(), [blocks[0].q.weight])[0]
    parts = [torch.autograd.grad(blocks[0](x[i : i + 1]).sum(), [blocks[0].q.weight])[0] for i in range(4)]
    assert float((sum(parts) - whole).norm() / whole.norm()) < 1e-12  # type: ignore[union-attr]


def test_views_that_do_not_fill_their_storage_are_coded_as_they_are_seen() -> None:
    class Split(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            wide = (hidden_states * 3.0).view(ROWS, TOKENS, 2, WIDTH // 2)
            return (wide[:, :, 0] * wide[:, :, 1]).repeat(1, 1, 2)

    blocks, x = nn.ModuleList([Split()]), inputs()
    want = torch.autograd.grad(blocks[0](x).sum(), x)[0]
    coded = Coded(blocks, ["0"], 1)
    got = torch.autograd.grad(blocks[0](x).sum(), x)[0]
    assert coded.kept_bytes["0"] == ROWS * TOKENS * WIDTH * 8
    assert 0 < float((got - want).norm() / want.norm()) < 0.01


def test_a_tensor_changed_in_place_is_refused() -> None:
    blocks, x = net(), inputs()
    kept: list[Tensor] = []
    blocks[0].bend = lambda t: (kept.append(t), t.mul_(2.0))
    Coded(blocks, ["0"], 1)
    y = blocks[0](x)
    with pytest.raises(OffloadError, match="changed in place"):
        y.sum().backward()


def test_an_exception_half_way_leaves_nothing_behind() -> None:
    blocks, x = net(), inputs()
    want = torch.autograd.grad(blocks[0](x).sum(), x)[0]
    coded = Coded(blocks, ["0"], 1)

    def fall(_: Tensor) -> None:
        raise RuntimeError("fell")

    blocks[0].bend = fall
    with pytest.raises(RuntimeError, match="fell"):
        blocks[0](x)
    gc.collect()
    assert not coded._known
    blocks[0].bend = lambda t: t
    assert float((torch.autograd.grad(blocks[0](x).sum(), x)[0] - want).norm() / want.norm()) < 0.01


def test_a_graph_that_is_kept_gives_the_same_twice() -> None:
    blocks, x = net(), inputs()
    Coded(blocks, ["0"], 1)
    y = blocks[0](x).sum()
    one = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], one)


def test_codes_go_on_to_a_tier() -> None:
    blocks, x = net(), inputs()
    coded = Coded(blocks, ["0"], 1)
    want = torch.autograd.grad(blocks[0](x).sum(), x)[0]
    coded.then = Saved(SimulatedDisk(), least=1)
    coded.then.begin([])
    y = blocks[0](x)
    assert coded.then.stored >= 3
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


def test_small_tensors_whole_numbers_and_statistics_stay() -> None:
    blocks, x = net(), inputs()
    few = x[:, : LEAST // WIDTH // ROWS]
    want = torch.autograd.grad(blocks[0](few).sum(), blocks[0].q.weight)[0]
    coded = Coded(blocks, ["0"], 1)
    assert torch.equal(torch.autograd.grad(blocks[0](few).sum(), blocks[0].q.weight)[0], want)
    with pytest.raises(EffectError, match="0 bytes were coded to 0"):
        coded.assert_effect()
    coded.narrow = WIDTH
    blocks[0](x)
    assert coded.kept_bytes["0"] == 0
    coded.narrow = 1
    blocks[0](x)
    coded.assert_effect()


def test_tensors_longer_than_a_piece_are_coded_in_pieces() -> None:
    x = torch.randn(1, PIECE + 300, generator=torch.Generator().manual_seed(2)).requires_grad_()
    square = nn.ModuleList([nn.Module()])
    square[0].forward = lambda hidden_states: hidden_states.square()
    Coded(square, ["0"], 0)
    (got,) = torch.autograd.grad(square[0](x[:, :, None])[..., 0].sum(), x)
    assert torch.equal(got, 2 * rounded(x.detach()))


def test_recipes_take_8_and_4_and_nothing_else() -> None:
    values = {"model": "x", "data": {"train": "pydoc"}, "output": "o"}
    made = load_recipe({**values, "activations": {"kept_bits": 4}})
    assert made.activations.kept_bits == 4
    assert load_recipe(made.as_dict()) == made
    assert load_recipe(values).activations.kept_bits is None
    for wrong in (2, "8 bits", True):
        with pytest.raises(RecipeError, match=r"activations\.kept_bits"):
            load_recipe({**values, "activations": {"kept_bits": wrong}})
