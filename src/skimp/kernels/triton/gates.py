"""SwiGLU, GeGLU and GELU in Triton: one element-wise kernel each way; formulas as in `skimp.kernels.gelu`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
#: What a gate is: x sigmoid(x); x P(x) with P the normal distribution; the same by tanh.
SILU, EXACT, BY_TANH = 0, 1, 2


@triton.jit
def _weigh(x, KIND: tl.constexpr):
    """(P, d(x P) / dx) at x."""
    if KIND == 0:
        p = tl.sigmoid(x)
        slope = p + x * p * (1.0 - p)
    elif KIND == 1:
        p = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = p + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        c = tl.minimum(tl.maximum(x, -64.0), 64.0)  # beyond, P is 0 or 1 and x^3 may be infinite
        p = tl.sigmoid(1.5957691216057308 * (c + 0.044715 * c * c * c))
        slope = p + c * p * (1.0 - p) * 1.5957691216057308 * (1.0 + 0.134145 * c * c)
    return p, slope


@triton.jit
def _forward(x_at, up_at, y_at, n, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
    p, _ = _weigh(x, KIND)
    y = x * p
    if GATED:
        y *= tl.load(up_at + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_at + at, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy_at, x_at, up_at, dx_at, dup_at, n, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_at + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_at + at, mask=inside, other=0.0).to(tl.float32)
    p, slope = _weigh(x, KIND)
    if GATED:
        up = tl.load(up_at + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dup_at + at, (dy * x * p).to(dup_at.dtype.element_ty), mask=inside)
        dy *= up
    tl.store(dx_at + at, (dy * slope).to(dx_at.dtype.element_ty), mask=inside)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: int) -> Tensor:
        gate = gate.contiguous()
        up = None if up is None else up.contiguous()
        y, n = torch.empty_like(gate), gate.numel()
        _forward[(triton.cdiv(n, BLOCK),)](gate, gate if up is None else up, y, n, kind, up is not None, BLOCK)
        ctx.save_for_backward(gate, *(() if up is None else (up,)))
        ctx.kind = kind
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate, *ups = ctx.saved_tensors
        dy, n, up = upstream.contiguous(), gate.numel(), ups[0] if ups else None
        dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        _backward[(triton.cdiv(n, BLOCK),)](
            dy, gate, gate if up is None else up, dgate, dgate if dup is None else dup, n, ctx.kind, up is not None,
            BLOCK,
        )  # fmt: skip
        return dgate, dup, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both of one shape."""
    y: Tensor = _Gate.apply(gate, up, SILU)
    return y


def geglu(gate: Tensor, up: Tensor, by_tanh: bool = False) -> Tensor:
    """gelu(gate) * up, both of one shape."""
    y: Tensor = _Gate.apply(gate, up, BY_TANH if by_tanh else EXACT)
    return y


def gelu(x: Tensor, by_tanh: bool = False) -> Tensor:
    """x times the normal distribution at x, or its approximation by tanh; any shape."""
    y: Tensor = _Gate.apply(x, None, BY_TANH if by_tanh else EXACT)
    return y
