"""A linear layer that keeps no input of its own where a fused layer made that input: y = x W' + b.

A linear layer keeps x for the gradient of W. Where x is the output of a fused RMSNorm or SwiGLU, the tensors it was
made from are kept by that layer already, so x is made again in backward (`core.remake`): one pass over memory instead
of rows x width x 4 bytes. In a block of SmolLM2 at 512 tokens that is 5.5 of 17 MB: two norms' outputs (2 x 576
columns) and the product before `down_proj` (1,536 columns) of 512 rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skimp.core.remake import Remake, how_made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear`, value and gradients to the bit.

    Args:
        x: (…, inputs). weight: (outputs, inputs). bias: (outputs,) or None.
    """
    made = how_made(x)
    if made is None or not weight.requires_grad or torch.is_autocast_enabled(x.device.type):
        return nn.functional.linear(x, weight, bias)
    return remade_linear(x, weight, bias, made)


def remade_linear(x: Tensor, weight: Tensor, bias: Tensor | None, made: Remake) -> Tensor:
    """`linear` for an x that `made` makes again, to the bit."""
    y: Tensor = _Linear.apply(x, weight, bias, made)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, made: Remake) -> Tensor:
        ctx.save_for_backward(weight, *made.inputs)
        ctx.make = made.make
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        rows = upstream.reshape(-1, upstream.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
        if ctx.needs_input_grad[1]:
            x = ctx.make(*inputs)
            dw = rows.t() @ x.reshape(-1, x.shape[-1])
            del x
        if ctx.needs_input_grad[0]:
            dx = (rows @ weight).view(*upstream.shape[:-1], weight.shape[1])
        return dx, dw, db, None
