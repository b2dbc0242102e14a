"""LayerNorm in one pass forward and two backward, and able to be made again by the layer that reads it.

What it saves beside PyTorch's own, which is fused too: nothing by itself, both keep the input and two numbers a row.
But its output is made from exactly those, so a linear layer behind it keeps no input of its own (`core.remake`):
rows x hidden x 4 bytes a norm, of OPT and every other model whose projections are plain linear layers.

y = w x' + b, x' = (x - mean) s, s = (mean (x - mean)^2 + eps)^-1/2; dx = s (g - x' mean(g x') - mean g), g = dy w;
dw = sum of dy x' over rows, db = sum of dy. The square is taken about the mean, so a large common offset cancels
nothing. Exact, sums in another order.

Sources: "Layer Normalization", 2016, arXiv 1607.06450; fused as in "Liger Kernel: Efficient Triton Kernels for LLM
Training", 2024, arXiv 2410.10989, section 3.2 (whose mean and scale are kept in the input's dtype: here in float32).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from skimp.core.remake import can_be_remade
from skimp.kernels.native import layers
from skimp.kernels.widened import narrowed, wide


@torch.library.custom_op("skimp::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, scale = torch.empty_like(x), x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])
    layers.layer_norm(x, weight, bias, y, mean, scale, eps)
    return y, mean, scale


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1])


@torch.library.custom_op("skimp::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    layers.layer_norm_backward(dy, x, weight, mean, scale, dx, dw, db)
    return dx, dw, db


@_layer_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


@torch.library.custom_op("skimp::layer_norm_backward_input", mutates_args=())
def _layer_norm_backward_input(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    layers.layer_norm_backward(dy, x, weight, mean, scale, dx, None, None)
    return dx


@_layer_norm_backward_input.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y: Tensor
        y, mean, scale = torch.ops.skimp.layer_norm(wide(x), wide(weight), wide(bias), eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.bias_dtype = bias.dtype
        return narrowed(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale = ctx.saved_tensors
        given = (wide(dy.contiguous()), wide(x), wide(weight), mean, scale)
        if not any(ctx.needs_input_grad[1:3]):
            return narrowed(torch.ops.skimp.layer_norm_backward_input(*given), x.dtype), None, None, None
        dx, dw, db = torch.ops.skimp.layer_norm_backward(*given)
        return narrowed(dx, x.dtype), narrowed(dw, weight.dtype), narrowed(db, ctx.bias_dtype), None


def _again(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    y: Tensor = torch.ops.skimp.layer_norm(wide(x), wide(weight), wide(bias), eps)[0]
    return narrowed(y, x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: (…, n) float32 or bfloat16, contiguous on a CPU. weight, bias: (n,).

    Returns:
        Shape and dtype of x.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return can_be_remade(y, partial(_again, eps=eps), x, weight, bias)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The plain form, in any float dtype."""
    centred = x - x.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)) + bias
