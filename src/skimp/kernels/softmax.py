"""Softmax over the last dimension, plain or of capped logits, in two passes forward and two backward.

p = softmax(x), or of cap tanh(x / cap); dx = p (dy - sum p dy), times 1 - tanh^2 under the cap. Keeps p, and under a
cap also x. Plain autograd keeps tanh(x / cap) and p, and makes four tensors on the way.

Sources: "Liger Kernel", 2024, arXiv 2410.10989, section 3.2; soft-cap: Gemma 2, arXiv 2408.00118, section 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.kernels.native import layers
from skimp.kernels.widened import narrowed, wide


@torch.library.custom_op("skimp::softmax", mutates_args=())
def _softmax(x: Tensor, cap: float) -> Tensor:
    y = torch.empty_like(x)
    layers.softmax(x, y, cap)
    return y


@_softmax.register_fake
def _(x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("skimp::softmax_backward", mutates_args=())
def _softmax_backward(dy: Tensor, p: Tensor, x: Tensor, cap: float) -> Tensor:
    dx = torch.empty_like(p)
    layers.softmax_backward(dy, p, x, dx, cap)
    return dx


@_softmax_backward.register_fake
def _(dy: Tensor, p: Tensor, x: Tensor, cap: float) -> Tensor:
    return torch.empty_like(p)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        p: Tensor = narrowed(torch.ops.skimp.softmax(wide(x), cap), x.dtype)
        ctx.save_for_backward(p, x if cap else p)
        ctx.cap = cap
        return p

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        p, x = ctx.saved_tensors
        dx: Tensor = torch.ops.skimp.softmax_backward(wide(dy.contiguous()), wide(p), wide(x), ctx.cap)
        return narrowed(dx, p.dtype), None


def softmax(x: Tensor, softcap: float | None = None) -> Tensor:
    """Softmax over the last dimension of x, capped before where `softcap` is given; float32 or bfloat16 on a CPU.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    p: Tensor = _Softmax.apply(x.contiguous(), softcap or 0.0)  # type: ignore[no-untyped-call]
    return p


def softmax_reference(x: Tensor, softcap: float | None = None) -> Tensor:
    """The plain form, in any float dtype."""
    return torch.softmax(x if softcap is None else softcap * torch.tanh(x / softcap), -1)
