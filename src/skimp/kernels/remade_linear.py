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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: bool = False) -> Tensor:
    """`torch.nn.functional.linear`, value and gradients to the bit (with `accumulate` to the rounding of one sum).

    Args:
        x: (…, inputs). weight: (outputs, inputs). bias: (outputs,) or None.
        accumulate: add the gradient of a weight that holds one already into it, inside the product: a micro-batch
            after the first neither writes nor reads again 4 bytes a parameter, 0.4 GB of SmolLM2-135M. Autograd is
            then handed no gradient, so no hook may want to see it.
    """
    made = how_made(x)
    # Of a bfloat16 sum every rounding counts, and autograd's own is the one that users know.
    accumulate = accumulate and weight.dtype in (torch.float32, torch.float64)
    plain = not weight.requires_grad or torch.is_autocast_enabled(x.device.type)
    if plain or (made is None and not accumulate):
        return nn.functional.linear(x, weight, bias)
    return remade_linear(x, weight, bias, made, accumulate)


def remade_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, made: Remake | None, accumulate: bool = False
) -> Tensor:
    """`linear` for an x that `made` makes again, to the bit; for None it is kept."""
    y: Tensor = _Linear.apply(x, weight, bias, made, accumulate)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, made: Remake | None, accumulate: bool
    ) -> Tensor:
        if made is None:
            ctx.save_for_backward(weight, x)
        else:
            made.again.readers += 1
            ctx.save_for_backward(weight, *made.inputs)
        ctx.again = None if made is None else made.again
        ctx.accumulate = accumulate
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
            x = inputs[0] if ctx.again is None else ctx.again(*inputs)
            x = x.reshape(-1, x.shape[-1])
            if ctx.accumulate and weight.grad is not None:
                weight.grad.addmm_(rows.t(), x)
            else:
                dw = rows.t() @ x
            del x
        if ctx.needs_input_grad[0]:
            dx = (rows @ weight).view(*upstream.shape[:-1], weight.shape[1])
        return dx, dw, db, None, None
