"""Rotary position embedding in one pass each way: heads turned by the angles of their position.

The plain form, as HF models write it, is q cos + cat(-q2, q1) sin for each of queries and keys. Forward that is six
passes over memory (negate, concatenate, two products, a sum); backward about ten, because the gradient of each half is
put into a tensor of zeros first. On two cores those passes were a fifth of a training step of SmolLM2-135M. This form
reads and writes each number once, and its gradient is the same rotation turned back. Bit-equal to the plain form,
values and gradients. Neither keeps anything but the angles.

Source: "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864, section 3.4; fused as
in "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.kernels.native import library


@torch.library.custom_op("skimp::rotary", mutates_args=())
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    y = torch.empty_like(x)
    library.rotary(x, y, cos, sin, inverse)
    return y


@_rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return torch.empty_like(x)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        y: Tensor = torch.ops.skimp.rotary(x, cos, sin, False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return torch.ops.skimp.rotary(_dense(dy), *ctx.saved_tensors, True), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of x by the angles of its position.

    Args:
        x: (rows, heads, seq, dim) float32 on a CPU, dim even and dense in memory; any order of the others.
        cos, sin: (1 or rows, seq, dim) float32, contiguous, without gradient.

    Returns:
        A new tensor laid out as x.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return y


def fits_native(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the native form takes these: facts of shape, type and place, never of values."""
    return (
        x.dim() == 4
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:] == x.shape[2:]
        and x.shape[3] % 2 == 0
        and x.stride(3) == 1
        and not cos.requires_grad
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x, cos, sin))
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The plain form, in any float dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def _dense(dy: Tensor) -> Tensor:
    return dy if dy.stride(3) == 1 else dy.contiguous()
