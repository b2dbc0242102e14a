"""Block-sparse attention in Triton: forward, dq by query blocks, dk and dv by key blocks; as `sparse_attention`.

A program has one block of one head and walks the list of the other side's blocks: rows of the pattern for a query
block, columns for a key block, so that nothing is added by two programs and the sums have one order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.kernels.block_pattern import BlockPattern


@triton.jit
def _forward(
    q_at, k_at, v_at, o_at, lse_at, starts_at, columns_at, scale, heads, group, seq, blocks,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    kv = head // heads * (heads // group) + head % heads // group
    lanes, dims = tl.arange(0, BLOCK), tl.arange(0, DIM)
    mine = i * BLOCK + lanes
    q = tl.load(q_at + (head * seq + mine)[:, None] * DIM + dims[None, :], mask=mine[:, None] < seq, other=0.0)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    out = tl.zeros((BLOCK, DIM), tl.float32)
    row = (head % heads // group) * (blocks + 1) + i
    for at in range(tl.load(starts_at + row), tl.load(starts_at + row + 1)):
        theirs = tl.load(columns_at + at) * BLOCK + lanes
        there = (theirs < seq)[:, None]
        k = tl.load(k_at + (kv * seq + theirs)[:, None] * DIM + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_at + (kv * seq + theirs)[:, None] * DIM + dims[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((theirs[None, :] <= mine[:, None]) & (theirs[None, :] < seq), s, -float("inf"))
        above = tl.maximum(most, tl.max(s, 1))
        fade = tl.exp(most - above)
        p = tl.exp(s - above[:, None])
        total = total * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = above
    out = out / total[:, None]
    tl.store(
        o_at + (head * seq + mine)[:, None] * DIM + dims[None, :],
        out.to(o_at.dtype.element_ty),
        mask=mine[:, None] < seq,
    )
    tl.store(lse_at + head * seq + mine, most + tl.log(total), mask=mine < seq)


@triton.jit
def _backward_queries(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dq_at, starts_at, columns_at, scale, heads, group, seq, blocks,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, head = tl.program_id(0), tl.program_id(1)
    kv = head // heads * (heads // group) + head % heads // group
    lanes, dims = tl.arange(0, BLOCK), tl.arange(0, DIM)
    mine = i * BLOCK + lanes
    here, place = (mine < seq)[:, None], (head * seq + mine)[:, None] * DIM + dims[None, :]
    q, do = tl.load(q_at + place, mask=here, other=0.0), tl.load(do_at + place, mask=here, other=0.0)
    lse = tl.load(lse_at + head * seq + mine, mask=mine < seq, other=float("inf"))
    delta = tl.load(delta_at + head * seq + mine, mask=mine < seq, other=0.0)
    dq = tl.zeros((BLOCK, DIM), tl.float32)
    row = (head % heads // group) * (blocks + 1) + i
    for at in range(tl.load(starts_at + row), tl.load(starts_at + row + 1)):
        theirs = tl.load(columns_at + at) * BLOCK + lanes
        there = (theirs < seq)[:, None]
        k = tl.load(k_at + (kv * seq + theirs)[:, None] * DIM + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_at + (kv * seq + theirs)[:, None] * DIM + dims[None, :], mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (theirs[None, :] <= mine[:, None]) & (theirs[None, :] < seq)
        p = tl.where(seen, tl.exp(s - lse[:, None]), 0.0)
        ds = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta[:, None]) * scale
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    tl.store(dq_at + place, dq.to(dq_at.dtype.element_ty), mask=here)


@triton.jit
def _backward_keys(
    q_at, k_at, v_at, do_at, lse_at, delta_at, dk_at, dv_at, starts_at, rows_at, scale, heads, group, seq, blocks,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    j, kv = tl.program_id(0), tl.program_id(1)
    key_heads = heads // group
    lanes, dims = tl.arange(0, BLOCK), tl.arange(0, DIM)
    mine = j * BLOCK + lanes
    here, place = (mine < seq)[:, None], (kv * seq + mine)[:, None] * DIM + dims[None, :]
    k, v = tl.load(k_at + place, mask=here, other=0.0), tl.load(v_at + place, mask=here, other=0.0)
    dk, dv = tl.zeros((BLOCK, DIM), tl.float32), tl.zeros((BLOCK, DIM), tl.float32)
    column = kv % key_heads * (blocks + 1) + j
    for one in range(group):
        head = kv // key_heads * heads + kv % key_heads * group + one
        for at in range(tl.load(starts_at + column), tl.load(starts_at + column + 1)):
            theirs = tl.load(rows_at + at) * BLOCK + lanes
            where, there = (head * seq + theirs)[:, None] * DIM + dims[None, :], (theirs < seq)[:, None]
            q, do = tl.load(q_at + where, mask=there, other=0.0), tl.load(do_at + where, mask=there, other=0.0)
            lse = tl.load(lse_at + head * seq + theirs, mask=theirs < seq, other=float("inf"))
            delta = tl.load(delta_at + head * seq + theirs, mask=theirs < seq, other=0.0)
            s = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
            seen = (mine[:, None] <= theirs[None, :]) & (theirs[None, :] < seq)
            p = tl.where(seen, tl.exp(s - lse[None, :]), 0.0)
            dv += tl.dot(p.to(do.dtype), do, input_precision="ieee")
            ds = p * (tl.dot(v, tl.trans(do), input_precision="ieee") - delta[None, :]) * scale
            dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    tl.store(dk_at + place, dk.to(dk_at.dtype.element_ty), mask=here)
    tl.store(dv_at + place, dv.to(dv_at.dtype.element_ty), mask=here)


@lru_cache(maxsize=16)
def _lists(pattern: BlockPattern, blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(starts, columns) of query blocks and (starts, rows) of key blocks, int32 on the device."""
    starts, columns = (torch.tensor(list(part), dtype=torch.int32) for part in pattern.listed(blocks))
    back_starts: list[int] = []
    back_rows: list[int] = []
    turned: list[list[int]] = [[] for _ in range(pattern.heads * blocks)]
    for g in range(pattern.heads):
        for i in range(blocks):
            for j in pattern.row(g, i):
                turned[g * blocks + j].append(i)
    for g in range(pattern.heads):
        for j in range(blocks):
            back_starts.append(len(back_rows))
            back_rows += turned[g * blocks + j]
        back_starts.append(len(back_rows))
    back = (torch.tensor(part, dtype=torch.int32) for part in (back_starts, back_rows))
    given = [part.to(device) for part in (starts, columns, *back)]
    return given[0], given[1], given[2], given[3]


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float) -> Tensor:
        q, k, v = (t.contiguous() for t in (q, k, v))
        rows, heads, seq, dim = q.shape
        blocks = -(-seq // pattern.block)
        lists = _lists(pattern, blocks, q.device)
        out, lse = torch.empty_like(q), torch.empty(rows, heads, seq, dtype=torch.float32, device=q.device)
        sizes = (scale, heads, heads // pattern.heads, seq, blocks, dim, pattern.block)
        _forward[(blocks, rows * heads)](q, k, v, out, lse, lists[0], lists[1], *sizes)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lists, ctx.sizes = lists, sizes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        blocks = ctx.sizes[4]
        given = (q, k, v, dout, lse, delta)
        _backward_queries[(blocks, q.shape[0] * q.shape[1])](*given, dq, *ctx.lists[:2], *ctx.sizes)
        _backward_keys[(blocks, k.shape[0] * k.shape[1])](*given, dk, dv, *ctx.lists[2:], *ctx.sizes)
        return dq, dk, dv, None, None


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float | None = None) -> Tensor:
    """As `skimp.kernels.sparse_attention.sparse_attention`; block and dim powers of two, as Triton's blocks are.

    Raises:
        SkimpError: they are not.
    """
    dim = q.shape[3]
    for what, size in (("block", pattern.block), ("head", dim)):
        if size < 16 or size & (size - 1):
            raise SkimpError(f"a {what} of 16, 32, 64 or 128 for the Triton form", f"{size}", instead="64")
    y: Tensor = _Sparse.apply(q, k, v, pattern, dim**-0.5 if scale is None else scale)
    return y
