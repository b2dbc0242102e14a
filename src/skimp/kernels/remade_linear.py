"""A linear layer that keeps no input of its own where a fused layer made that input: y = x W' + b.

GPT-2 stores its weights the other way round, (inputs, outputs): y = x W + b.

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
            then handed no gradient, so a weight with hooks is left to it.
    """
    made, accumulate = how_made(x), _may_accumulate(weight, accumulate)
    if _plain(x, weight) or (made is None and not accumulate):
        return nn.functional.linear(x, weight, bias)
    return remade_linear(x, weight, bias, made, accumulate)


def linear_in_out(x: Tensor, weight: Tensor, bias: Tensor, accumulate: bool = False) -> Tensor:
    """As `linear`, for a weight stored (inputs, outputs), as transformers' Conv1D of GPT-2 does."""
    made, accumulate = how_made(x), _may_accumulate(weight, accumulate)
    if _plain(x, weight) or (made is None and not accumulate):
        return _in_out(x, weight, bias)
    return remade_linear(x, weight, bias, made, accumulate, in_out=True)


def _may_accumulate(weight: Tensor, asked: bool) -> bool:
    # Of a bfloat16 sum every rounding counts, and autograd's own is the one that users know.
    return asked and weight.dtype in (torch.float32, torch.float64)


def _plain(x: Tensor, weight: Tensor) -> bool:
    return not weight.requires_grad or torch.is_autocast_enabled(x.device.type)


def _in_out(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])


def remade_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    made: Remake | None,
    accumulate: bool = False,
    in_out: bool = False,
) -> Tensor:
    """`linear` (`linear_in_out`) for an x that `made` makes again, to the bit; for None it is kept."""
    y: Tensor = _Linear.apply(x, weight, bias, made, accumulate, in_out)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, made: Remake | None, accumulate: bool, in_out: bool
    ) -> Tensor:
        if made is None:
            ctx.save_for_backward(weight, x)
        else:
            made.again.readers += 1
            ctx.save_for_backward(weight, *made.inputs)
        ctx.again = None if made is None else made.again
        # Under hooks on saved tensors (recompute, offload, codes) what comes back is an alias, which holds no gradient.
        # And a hook on the weight is owed its gradient, which there is none of where it is added in place.
        ctx.owner = weight if accumulate and weight.is_leaf and not weight._backward_hooks else None
        ctx.in_out = in_out
        if in_out:
            assert bias is not None  # Conv1D always has one
            return _in_out(x, weight, bias)
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
            first, second = (x.t(), rows) if ctx.in_out else (rows.t(), x)
            held = None if ctx.owner is None else ctx.owner.grad
            if held is not None:
                held.addmm_(first, second)
            else:
                dw = first @ second
            del x, first, second
        if ctx.needs_input_grad[0]:
            w = weight.t() if ctx.in_out else weight
            dx = (rows @ w).view(*upstream.shape[:-1], w.shape[1])
        return dx, dw, db, None, None, None
