"""RMSNorm and SwiGLU in one pass each, with a plain reference beside them.

What they save: HF's RMSNorm keeps two tensors of the layer's width for backward, this one its input and a number per
row; HF's SwiGLU keeps gate, silu(gate) and up, this one gate and up. What they cost: nothing, they are faster (one pass
over memory forward and two backward instead of seven and about fifteen). Exact: the same mathematics, sums in another
order, a few ulp apart.

Formulas: y = w x s, s = (mean x^2 + eps)^-1/2; dx = s (m - x s^2 mean(m x)), m = dy w; dw = sum of dy x s over rows.
y = silu(a) b; da = dy b (sigma + a sigma (1 - sigma)); db = dy silu(a), sigma = sigmoid(a).

bfloat16 tensors are widened for the call and the result is rounded once (HF's RMSNorm rounds twice); what is kept for
backward stays bfloat16, 2 bytes a number where HF keeps the float32 copy and the rounded one, 6.

Source: "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from skimp.core.remake import can_be_remade
from skimp.kernels.native import library
from skimp.kernels.widened import fits_native, narrowed, wide

__all__ = ["fits_native", "rms_norm", "rms_norm_reference", "swiglu", "swiglu_reference"]


@torch.library.custom_op("skimp::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
    library.rms_norm(x, weight, y, scale, eps)
    return y, scale


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


@torch.library.custom_op("skimp::rms_norm_backward", mutates_args=())
def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    library.rms_norm_backward(dy, x, weight, scale, dx, dw)
    return dx, dw


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.custom_op("skimp::rms_norm_backward_input", mutates_args=())
def _rms_norm_backward_input(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    library.rms_norm_backward(dy, x, weight, scale, dx, None)
    return dx


@_rms_norm_backward_input.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("skimp::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate)
    library.swiglu(gate, up, y)
    return y


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("skimp::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    library.swiglu_backward(dy, gate, up, dgate, dup)
    return dgate, dup


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor
        y, scale = torch.ops.skimp.rms_norm(wide(x), wide(weight), eps)
        ctx.save_for_backward(x, weight, scale)
        return narrowed(y, torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        given = (wide(dy.contiguous()), wide(x), wide(weight), scale)
        if not ctx.needs_input_grad[1]:  # a frozen gain: half of the passes over memory
            return narrowed(torch.ops.skimp.rms_norm_backward_input(*given), x.dtype), None, None
        dx, dw = torch.ops.skimp.rms_norm_backward(*given)
        return narrowed(dx, x.dtype), narrowed(dw, weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y: Tensor = torch.ops.skimp.swiglu(wide(gate), wide(up))
        return narrowed(y, gate.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.ops.skimp.swiglu_backward(wide(dy.contiguous()), wide(gate), wide(up))
        return narrowed(dgate, gate.dtype), narrowed(dup, up.dtype)


def _norm_again(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = torch.ops.skimp.rms_norm(wide(x), wide(weight), eps)[0]
    return narrowed(y, torch.promote_types(x.dtype, weight.dtype))


def _swiglu_again(gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = torch.ops.skimp.swiglu(wide(gate), wide(up))
    return narrowed(y, gate.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w x / sqrt(mean x^2 + eps) over the last dimension; (…, n) float32 or bfloat16 on a CPU.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return can_be_remade(y, partial(_norm_again, eps=eps), x, weight)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both of one shape, float32 or bfloat16 on a CPU.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return can_be_remade(y, _swiglu_again, gate, up)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain form, in any float dtype."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The plain form, in any float dtype."""
    return gate * torch.sigmoid(gate) * up
