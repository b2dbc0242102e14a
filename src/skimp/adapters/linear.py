"""A linear layer with a low-rank addition as one operation: y = x W' + b + s (drop(x) A') B'.

Kept for backward: x, which a trained linear layer keeps as well, and nothing else; where a fused norm or activation
made x, what that one keeps already (`core.remake`), hence no byte. x A' (tokens x r) is made again;
s B A is never formed, nor is a gradient of W. The addition goes into the base's own output (`addmm_`), so no second
tensor of the layer's width exists.

With G = dL/dy, h = drop(x) A' and e = G B: dB = s G' h, dA = s e' drop(x), dx = G W + s drop(e A) with the same mask.

Costs 2 r / inputs + 2 r / outputs of the layer's own products forward, and as much again twice backward.

Paper: "LoRA: Low-Rank Adaptation of Large Language Models", Hu et al., 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.adapters.dropout import Dropout
from skimp.core.coded import Base, product, product_back
from skimp.core.remake import Remake, how_made


def lora_linear(
    x: Tensor,
    weight: Base,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    *,
    transposed: bool = False,
    dropout: Dropout | None = None,
) -> Tensor:
    """x W' + bias + scale * (x A') B'.

    Args:
        x: (…, inputs), float.
        weight: (outputs, inputs), frozen; (inputs, outputs) when `transposed` (GPT-2 stores it so). Another dtype than
            x's is cast for the product and again in backward: no copy of it is kept. Or a `Coded` matrix (outputs,
            inputs), decoded slice by slice for the product and again in backward.
        bias: (outputs,) or None, frozen.
        a: (r, inputs). b: (outputs, r). Trained; float32 beside a half-precision x, and cast for the products (their
            gradients come back in float32).
        scale: s. dropout: masks of this forward, or None.

    Returns:
        (…, outputs) in x's dtype, or the autocast dtype where autocast is on, as `nn.Linear` does.
    """
    made = how_made(x)
    y: Tensor = _LoRALinear.apply(x, weight, bias, a, b, scale, transposed, dropout, made)  # type: ignore[no-untyped-call]
    return y


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Base,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        transposed: bool,
        dropout: Dropout | None,
        made: Remake | None,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        dense = weight if isinstance(weight, Tensor) else None
        ctx.save_for_backward(dense, a, b, *((x,) if made is None else made.inputs))
        ctx.coded = weight if dense is None else None
        if made is not None:
            made.again.readers += 1
        ctx.again = None if made is None else made.again
        ctx.scale, ctx.transposed, ctx.dropout, ctx.dtype = scale, transposed, dropout, dtype
        with torch.autocast(kind, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(dtype)
            y = product(weight, flat, bias, transposed=transposed)
            y.addmm_(_thin(flat, a.to(dtype), dropout), b.to(dtype).t(), alpha=scale)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dense, a, b, *kept = ctx.saved_tensors
        x = kept[0] if ctx.again is None else ctx.again(*kept)
        scale, dropout, dtype = ctx.scale, ctx.dropout, ctx.dtype
        g = upstream.reshape(-1, upstream.shape[-1])
        low_a, flat = a.to(dtype), x.reshape(-1, x.shape[-1]).to(dtype)
        e = torch.mm(g, b.to(dtype))
        da = db = dx = None
        if ctx.needs_input_grad[4]:
            # (r, outputs) first: with the thin side outside, the product is up to three times as fast on a CPU.
            thin = torch.mm(_thin(flat, low_a, dropout).t(), g)
            db = thin.mul_(scale).t().to(b.dtype).contiguous()
        if ctx.needs_input_grad[3]:
            da = _grad_a(e, flat, dropout).mul_(scale).to(a.dtype)
        if ctx.needs_input_grad[0]:
            dx = product_back(dense if ctx.coded is None else ctx.coded, g, transposed=ctx.transposed)
            _add_thin(dx, e, low_a, scale, dropout)
            dx = dx.view(x.shape).to(x.dtype)
        return dx, None, None, da, db, None, None, None, None


def _thin(flat: Tensor, a: Tensor, dropout: Dropout | None) -> Tensor:
    """drop(x) A', (tokens, r)."""
    if dropout is None:
        return torch.mm(flat, a.t())
    h = flat.new_empty(flat.shape[0], a.shape[0])
    for start, stop in dropout.pieces(*flat.shape):
        part = flat[start:stop]
        torch.mm(dropout.mask(start, stop, part).mul_(part), a.t(), out=h[start:stop])
    return h


def _grad_a(e: Tensor, flat: Tensor, dropout: Dropout | None) -> Tensor:
    """e' drop(x), (r, inputs)."""
    if dropout is None:
        return torch.mm(e.t(), flat)
    da = flat.new_zeros(e.shape[1], flat.shape[1])
    for start, stop in dropout.pieces(*flat.shape):
        part = flat[start:stop]
        da.addmm_(e[start:stop].t(), dropout.mask(start, stop, part).mul_(part))
    return da


def _add_thin(dx: Tensor, e: Tensor, a: Tensor, scale: float, dropout: Dropout | None) -> None:
    """dx += s drop(e A), in place."""
    if dropout is None:
        dx.addmm_(e, a, alpha=scale)
        return
    for start, stop in dropout.pieces(*dx.shape):
        part = dx[start:stop]
        part.addcmul_(torch.mm(e[start:stop], a), dropout.mask(start, stop, part), value=scale)


def lora_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, mask: Tensor | None = None
) -> Tensor:
    """The plain form, differentiated by autograd; `mask` like x holds dropout's factors."""
    dropped = x if mask is None else x * mask
    return F.linear(x, weight, bias) + scale * F.linear(F.linear(dropped, a), b)
