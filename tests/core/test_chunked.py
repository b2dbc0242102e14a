"""Chunked application against the whole: output and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from skimp.core.chunked import chunked
from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness

N, H, WIDE = 123, 37, 91


class Mlp(nn.Module):
    def __init__(self, dtype=torch.float64, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.gate = nn.Linear(H, WIDE, bias=False, dtype=dtype)
        self.up = nn.Linear(H, WIDE, dtype=dtype)
        self.down = nn.Linear(WIDE, H, dtype=dtype)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(3, N // 3, H, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return x, torch.randn(x.shape, generator=g, dtype=torch.float64).to(dtype)


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("chunk", [1, 7, 64, N, 1000])
def test_equal_to_the_whole_with_every_gradient(chunk):
    mlp, (x, upstream) = Mlp(), inputs()
    every = [x, *mlp.parameters()]
    got, want = chunked(mlp, x, chunk=chunk), mlp(x)
    assert got.shape == want.shape
    pairs = [(got, want)]
    pairs += zip(torch.autograd.grad(got, every, upstream), torch.autograd.grad(want, every, upstream), strict=True)
    assert max(relative(a, b) for a, b in pairs) < 1e-13


def test_one_chunk_is_bit_equal():
    mlp, (x, upstream) = Mlp(torch.float32), inputs(torch.float32)
    flat = x.detach().reshape(-1, H).requires_grad_()
    every = [flat, *mlp.parameters()]
    got, want = chunked(mlp, flat, chunk=N), mlp(flat)
    assert torch.equal(got, want)
    upstream = upstream.view(-1, H)
    for a, b in zip(torch.autograd.grad(got, every, upstream), torch.autograd.grad(want, every, upstream), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("frozen", ["x", "up", "all"])
def test_frozen_parts(frozen):
    mlp, (x, upstream) = Mlp(), inputs()
    if frozen == "x":
        x = x.detach()
    for name, p in mlp.named_parameters():
        p.requires_grad_(frozen == "x" or (frozen == "up" and not name.startswith("up")))
    every = [t for t in (x, *mlp.parameters()) if t.requires_grad]
    got, want = chunked(mlp, x, chunk=10), mlp(x)
    for a, b in zip(torch.autograd.grad(got, every, upstream), torch.autograd.grad(want, every, upstream), strict=True):
        assert relative(a, b) < 1e-13
    with torch.no_grad():
        assert not chunked(mlp, x, chunk=10).requires_grad


def test_output_of_another_shape_and_a_parameter_that_is_not_used():
    x, _ = inputs()
    scale, unused = torch.tensor(2.0).double().requires_grad_(), torch.zeros(3, requires_grad=True)
    got = chunked(lambda t: (scale * t).square().sum(-1), x, [scale, unused], chunk=5)
    assert got.shape == x.shape[:-1]
    a, b = torch.autograd.grad(got.sum(), [x, scale])
    want = torch.autograd.grad((scale * x).square().sum(), [x, scale])
    assert relative(a, want[0]) < 1e-13
    assert relative(b, want[1]) < 1e-13


def test_bfloat16_sums_do_not_worsen_with_the_number_of_chunks():
    mlp, (x, upstream) = Mlp(torch.bfloat16), inputs(torch.bfloat16)
    for chunk in (16, 1):
        (got,) = torch.autograd.grad(chunked(mlp, x, chunk=chunk), [mlp.down.bias], upstream)
        assert got.dtype == torch.bfloat16
        # The bias gradient is a plain sum of upstream; each chunk's and the last rounding are 2^-9. A running
        # bfloat16 sum of 123 terms errs by several times more.
        assert relative(got, upstream.double().sum((0, 1))) < 4e-3


def test_autocast_recomputation_and_simulation():
    mlp, (x, upstream) = Mlp(torch.float32), inputs(torch.float32)
    every = [x, *mlp.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = mlp(x), chunked(mlp, x, chunk=64)
    assert got.dtype == want.dtype == torch.bfloat16
    upstream16 = upstream.bfloat16()
    by_whole = torch.autograd.grad(want, every, upstream16)
    pairs = zip(torch.autograd.grad(got, every, upstream16), by_whole, strict=True)
    assert max(relative(a, b) for a, b in pairs) < 1e-2  # bfloat16 products, summed in two halves
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one = chunked(mlp, x, chunk=N)
    pairs = zip(torch.autograd.grad(one, every, upstream16), by_whole, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)  # only when backward runs under the same autocast
    outside = torch.autograd.grad(chunked(mlp, x, chunk=16), every, upstream)
    inside = checkpoint(lambda t: chunked(mlp, t, chunk=16), x, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(inside, every, upstream), outside, strict=True):
        assert torch.equal(a, b)
    with FakeTensorMode():
        fake, xf = Mlp(torch.float32), torch.zeros(N, H, requires_grad=True)
        chunked(fake, xf, chunk=16).sum().backward()
        assert xf.grad is not None
        assert fake.up.weight.grad is not None


def test_only_the_input_is_kept_and_the_insides_are_one_chunk_wide():
    mlp, _ = Mlp(torch.float32), None
    x = torch.zeros(4096, H, requires_grad=True)
    y, seen = witness(lambda: chunked(mlp, x, chunk=32))
    assert seen.held == 4096 * H * 4
    assert seen.peak < seen.held + 32 * (5 * WIDE + H) * 4
    _, seen = witness(lambda: y.sum().backward())
    parameters = sum(p.numel() for p in mlp.parameters()) * 4
    assert seen.peak < 4096 * H * 4 + 2 * parameters + 32 * (8 * WIDE + 4 * H) * 4


def test_refusals():
    mlp, (x, _) = Mlp(), inputs()
    with pytest.raises(SkimpError, match="1 token"):
        chunked(mlp, x, chunk=0)
    with pytest.raises(SkimpError, match="without params"):
        chunked(lambda t: mlp(t), x)
    with pytest.raises(SkimpError, match="not in params"):
        chunked(mlp, x, [mlp.up.weight], chunk=10).sum().backward()
    with pytest.raises(SkimpError, match="token-wise"):
        chunked(lambda t: t.sum(), x, [], chunk=10)
    y = chunked(mlp, x, chunk=10)
    with pytest.raises(SkimpError, match="create_graph"):
        torch.autograd.grad(y.sum(), [x], create_graph=True)
    y = chunked(mlp, x, chunk=10)
    with torch.no_grad():
        mlp.up.weight.mul_(2)
    with pytest.raises(SkimpError, match="changed in place"):
        y.sum().backward()


def test_a_parameter_that_is_itself_computed_gets_its_gradient():
    """An adapter's merged weight, say: the chunk stops there and autograd goes on once."""
    x, upstream = inputs()
    base, a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((H, H), (H, 2), (2, H)))
    grads = []
    for chunk in (10, None):
        merged = base + a @ b
        y = chunked(lambda t, w=merged: torch.tanh(t @ w), x, [merged], chunk) if chunk else torch.tanh(x @ merged)
        grads.append(torch.autograd.grad(y, [x, base, a, b], upstream))
    assert max(relative(p, q) for p, q in zip(*grads, strict=True)) < 1e-13
