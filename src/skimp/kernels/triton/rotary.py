"""Rotary positions in Triton: a program turns one position of one head; the gradient is the rotation turned back."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(
    x_at, y_at, cos_at, sin_at, heads, seq, dim, angles, x_row, x_head, x_pos, y_row, y_head, y_pos,
    INVERSE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row, head, pos = item // (heads * seq), item // seq % heads, item % seq
    half, lanes = dim // 2, tl.arange(0, HALF)
    inside = lanes < half
    x_at += tl.cast(row, tl.int64) * x_row + tl.cast(head, tl.int64) * x_head + tl.cast(pos, tl.int64) * x_pos
    y_at += tl.cast(row, tl.int64) * y_row + tl.cast(head, tl.int64) * y_head + tl.cast(pos, tl.int64) * y_pos
    at = row * angles + pos * dim + lanes
    a = tl.load(x_at + lanes, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_at + half + lanes, mask=inside, other=0.0).to(tl.float32)
    c1 = tl.load(cos_at + at, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos_at + half + at, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin_at + at, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin_at + half + at, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        first, second = a * c1 + b * s2, b * c2 - a * s1
    else:
        first, second = a * c1 - b * s1, b * c2 + a * s2
    tl.store(y_at + lanes, first.to(y_at.dtype.element_ty), mask=inside)
    tl.store(y_at + half + lanes, second.to(y_at.dtype.element_ty), mask=inside)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    rows, heads, seq, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    y = torch.empty_like(x)
    angles = seq * dim if cos.shape[0] > 1 else 0
    half = triton.next_power_of_2(max(1, dim // 2))
    _turn[(rows * heads * seq,)](
        x, y, cos.contiguous(), sin.contiguous(), heads, seq, dim, angles, *x.stride()[:3], *y.stride()[:3], inverse,
        half,
    )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _launch(dy, cos, sin, True), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `skimp.kernels.rotary.rotary`: x (rows, heads, seq, dim), cos and sin (1 or rows, seq, dim)."""
    y: Tensor = _Rotary.apply(x, cos, sin)
    return y
