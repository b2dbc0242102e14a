"""RMSNorm and LayerNorm in Triton; formulas and what is kept as in `skimp.kernels.fused` and `layer_norm`.

Gradients of gain and bias are sums over rows. A program sums a run of rows by itself; the partial sums, one row of
float32 a program, are added by torch: the same order every time, without atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skimp.kernels.triton.launch import piece, rows_of

#: Programs that share the rows in backward: enough for the processors of today's cards.
PARTS = 128


@triton.jit
def _forward(x_at, w_at, b_at, y_at, mean_at, scale_at, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTRED:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            total += tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(total, 0) / width
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        square += tl.where(inside, x * x, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(square, 0) / width + eps)
    if CENTRED:
        tl.store(mean_at + tl.program_id(0), mean)
    tl.store(scale_at + tl.program_id(0), scale)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        y = x * scale * tl.load(w_at + start + columns, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            y += tl.load(b_at + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_at + row + start + columns, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _backward_rows(dy_at, x_at, w_at, mean_at, scale_at, dx_at, width, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    scale = tl.load(scale_at + tl.program_id(0))
    mean = 0.0
    if CENTRED:
        mean = tl.load(mean_at + tl.program_id(0))
    along = tl.zeros((BLOCK,), tl.float32)
    level = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        g = tl.load(dy_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(w_at + start + columns, mask=inside, other=0.0).to(tl.float32)
        along += g * x
        level += g
    a = tl.sum(along, 0) * scale * scale / width
    c = 0.0
    if CENTRED:
        c = tl.sum(level, 0) / width
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32) - mean
        g = tl.load(dy_at + row + start + columns, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(w_at + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_at + row + start + columns, (scale * (g - x * a - c)).to(dx_at.dtype.element_ty), mask=inside)


@triton.jit
def _backward_columns(
    dy_at, x_at, mean_at, scale_at, dw_at, db_at, rows, width, each, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):
    part, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * each, tl.minimum(part * each + each, rows)):
        at = tl.cast(row, tl.int64) * width + columns
        dy = tl.load(dy_at + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean_at + row)
        dw += dy * x * tl.load(scale_at + row)
        db += dy
    tl.store(dw_at + part * width + columns, dw, mask=inside)
    if CENTRED:
        tl.store(db_at + part * width + columns, db, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        flat, rows, width = rows_of(x)
        dtype = x.dtype if bias is not None else torch.promote_types(x.dtype, weight.dtype)
        y = torch.empty_like(flat, dtype=dtype)
        mean, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        _forward[(rows,)](
            flat, weight, weight if bias is None else bias, y, mean, scale, width, eps, bias is not None, piece(width)
        )
        ctx.save_for_backward(flat, weight, scale, *(() if bias is None else (mean, bias)))
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, scale, *centre = ctx.saved_tensors
        mean, centred = (centre[0], True) if centre else (scale, False)
        dy, rows, width = rows_of(upstream)
        dx = torch.empty_like(x)
        _backward_rows[(rows,)](dy, x, weight, mean, scale, dx, width, centred, piece(width))
        dw = db = None
        if any(ctx.needs_input_grad[1:3]):
            parts = min(PARTS, rows)
            sums = torch.empty(2 if centred else 1, parts, width, dtype=torch.float32, device=x.device)
            block = min(piece(width), 256)
            _backward_columns[(parts, triton.cdiv(width, block))](
                dy, x, mean, scale, sums[0], sums[-1], rows, width, triton.cdiv(rows, parts), centred, block
            )
            dw = sums[0].sum(0).to(weight.dtype)
            db = sums[1].sum(0).to(centre[1].dtype) if centred else None
        return dx.view(upstream.shape), dw, db, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `skimp.kernels.fused.rms_norm`: x (…, n), weight (n,)."""
    y: Tensor = _Norm.apply(x, weight, None, eps)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As `skimp.kernels.layer_norm.layer_norm`: x (…, n), weight and bias (n,)."""
    y: Tensor = _Norm.apply(x, weight, bias, eps)
    return y
