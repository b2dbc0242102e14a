"""Softmax over the last dimension in Triton, plain or of capped logits; as `skimp.kernels.softmax`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skimp.kernels.triton.launch import piece, rows_of


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """(cap tanh(x / cap), its slope), or (x, 1)."""
    slope = tl.full(x.shape, 1.0, tl.float32)
    if CAPPED:
        bent = 2.0 * tl.sigmoid(2.0 * x / cap) - 1.0
        x = cap * bent
        slope = 1.0 - bent * bent
    return x, slope


@triton.jit
def level_of(x_at, row, width, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, sum of exp about it, sum) of one row, read once: a piece that raises the largest scales what was."""
    columns = tl.arange(0, BLOCK)
    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x, _ = capped(tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
        plain += tl.sum(tl.where(inside, x, 0.0), 0)
        x = tl.where(inside, x, -float("inf"))
        above = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - above) + tl.sum(tl.exp(x - above), 0)
        top = above
    return top, total, plain


@triton.jit
def _forward(x_at, y_at, width, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    top, total, _ = level_of(x_at, row, width, cap, CAPPED, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x, _ = capped(tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
        tl.store(y_at + row + start + columns, (tl.exp(x - top) / total).to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy_at, p_at, x_at, dx_at, width, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inner = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        p = tl.load(p_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
        inner += p * tl.load(dy_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(inner, 0)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        p = tl.load(p_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
        dx = p * (tl.load(dy_at + row + start + columns, mask=inside, other=0.0).to(tl.float32) - mean)
        if CAPPED:
            _, slope = capped(tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
            dx *= slope
        tl.store(dx_at + row + start + columns, dx.to(dx_at.dtype.element_ty), mask=inside)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        flat, rows, width = rows_of(x)
        p = torch.empty_like(flat)
        _forward[(rows,)](flat, p, width, cap, cap > 0, piece(width))
        ctx.save_for_backward(p, flat if cap else p)
        ctx.cap = cap
        return p

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        p, x = ctx.saved_tensors
        dy, rows, width = rows_of(upstream)
        dx = torch.empty_like(p)
        _backward[(rows,)](dy, p, x, dx, width, ctx.cap, ctx.cap > 0, piece(width))
        return dx, None


def softmax(x: Tensor, softcap: float | None = None) -> Tensor:
    """Softmax over the last dimension of x, capped before where `softcap` is given."""
    p: Tensor = _Softmax.apply(x, softcap or 0.0)
    return p
