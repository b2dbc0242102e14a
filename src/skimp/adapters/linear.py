"""A linear layer with a low-rank addition as one operation: y = g (x W' + s (drop(x) A') B' - s (x C') D') + b.

C and D are what A and B began with where the addition begins from W itself (`initial`); g scales outputs where rows are
normalised (`norms`). Both are absent in plain LoRA.

Kept for backward: x, which a trained linear layer keeps as well, and nothing else; where a fused norm or activation
made x, what that one keeps already (`core.remake`), hence no byte. x A' (tokens x r) is made again;
s B A is never formed, nor is a gradient of W. The addition goes into the base's own output (`addmm_`), so no second
tensor of the layer's width exists.

With G = dL/dy, h = drop(x) A' and e = G B: dB = s G' h, dA = s e' drop(x), dx = G W + s drop(e A) with the same mask.
With g, G becomes g G, and dg = Σ G u over tokens for u = y / g before the bias: u is made again in backward, a piece of
tokens at a time, which costs the layer's own product once more and keeps no second tensor of its width.

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
from skimp.core.repeat import rounds


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
    start: tuple[Tensor, Tensor] | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """gain * (x W' + scale * ((x A') B' - (x C') D')) + bias.

    Args:
        x: (…, inputs), float.
        weight: (outputs, inputs), frozen; (inputs, outputs) when `transposed` (GPT-2 stores it so). Another dtype than
            x's is cast for the product and again in backward: no copy of it is kept. Or a `Coded` matrix (outputs,
            inputs), decoded slice by slice for the product and again in backward.
        bias: (outputs,) or None, frozen.
        a: (r, inputs). b: (outputs, r). Trained; float32 beside a half-precision x, and cast for the products (their
            gradients come back in float32).
        scale: s. dropout: masks of this forward, or None.
        start: C (r, inputs) and D (outputs, r), frozen; dropout leaves their input alone. gain: (outputs,) or None.

    Returns:
        (…, outputs) in x's dtype, or the autocast dtype where autocast is on, as `nn.Linear` does.
    """
    made = how_made(x)
    first = (None, None) if start is None else start
    how = (scale, transposed, dropout, made)
    y: Tensor = _LoRALinear.apply(x, weight, bias, a, b, gain, *first, *how)  # type: ignore[no-untyped-call]
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
        gain: Tensor | None,
        c: Tensor | None,
        d: Tensor | None,
        scale: float,
        transposed: bool,
        dropout: Dropout | None,
        made: Remake | None,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        dense = weight if isinstance(weight, Tensor) else None
        ctx.coded = weight if dense is None else None
        ctx.save_for_backward(dense, a, b, gain, c, d, *((x,) if made is None else made.inputs))
        if made is not None:
            made.again.readers += 1
        ctx.again = None if made is None else made.again
        ctx.scale, ctx.transposed, ctx.dropout, ctx.dtype = scale, transposed, dropout, dtype
        with torch.autocast(kind, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(dtype)
            y = product(weight, flat, bias if gain is None else None, transposed=transposed)
            y.addmm_(_thin(flat, a.to(dtype), dropout), b.to(dtype).t(), alpha=scale)
            if c is not None and d is not None:
                y.addmm_(torch.mm(flat, c.to(dtype).t()), d.to(dtype).t(), alpha=-scale)
            if gain is not None:
                y.mul_(gain.to(dtype))
                if bias is not None:
                    y.add_(bias.to(dtype))
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dense, a, b, gain, c, d, *kept = ctx.saved_tensors
        weight = dense if ctx.coded is None else ctx.coded
        x = kept[0] if ctx.again is None else ctx.again(*kept)
        scale, dropout, dtype = ctx.scale, ctx.dropout, ctx.dtype
        g = upstream.reshape(-1, upstream.shape[-1])
        low_a, flat = a.to(dtype), x.reshape(-1, x.shape[-1]).to(dtype)
        if gain is not None:
            return _normed_backward(ctx, g, flat, x, weight, a, b, gain, c, d)
        e = torch.mm(g, b.to(dtype))
        da = db = dx = None
        if ctx.needs_input_grad[4]:
            # (r, outputs) first: with the thin side outside, the product is up to three times as fast on a CPU.
            thin = torch.mm(_thin(flat, low_a, dropout).t(), g)
            db = thin.mul_(scale).t().to(b.dtype).contiguous()
        if ctx.needs_input_grad[3]:
            da = _grad_a(e, flat, dropout).mul_(scale).to(a.dtype)
        if ctx.needs_input_grad[0]:
            dx = product_back(weight, g, transposed=ctx.transposed)
            _add_thin(dx, e, low_a, scale, dropout)
            if c is not None:
                dx.addmm_(torch.mm(g, d.to(dtype)), c.to(dtype), alpha=-scale)
            dx = dx.view(x.shape).to(x.dtype)
        return dx, None, None, da, db, *(None,) * 7


#: Numbers of the wider side that one piece of tokens has where outputs are scaled: 4 MiB in float32.
PIECE = 2**20


def _normed_backward(
    ctx: Any,
    g: Tensor,
    flat: Tensor,
    x: Tensor,
    weight: Base,
    a: Tensor,
    b: Tensor,
    gain: Tensor,
    c: Tensor | None,
    d: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """All gradients where outputs are scaled, tokens in pieces."""
    scale, dropout, dtype = ctx.scale, ctx.dropout, ctx.dtype
    low, up, k = a.to(dtype), b.to(dtype), gain.to(dtype)
    first = None if c is None or d is None else (c.to(dtype), d.to(dtype))
    da, db, dk = torch.zeros_like(low), torch.zeros_like(up), torch.zeros_like(k)
    dx = torch.empty_like(flat) if ctx.needs_input_grad[0] else None
    size = max(1, PIECE // max(weight.shape))
    for start in rounds(range(0, flat.shape[0], size)):
        stop = min(start + size, flat.shape[0])
        part, upstream = flat[start:stop], g[start:stop]
        mask = None if dropout is None else dropout.mask(start, stop, part)
        dropped = part if mask is None else part * mask
        h = torch.mm(dropped, low.t())
        if ctx.needs_input_grad[5]:
            u = product(weight, part, transposed=ctx.transposed).addmm_(h, up.t(), alpha=scale)
            if first is not None:
                u.addmm_(torch.mm(part, first[0].t()), first[1].t(), alpha=-scale)
            dk.add_(u.mul_(upstream).sum(0))
            del u
        scaled = upstream * k
        e = torch.mm(scaled, up)
        db.addmm_(scaled.t(), h, alpha=scale)
        da.addmm_(e.t(), dropped, alpha=scale)
        if dx is not None:
            dx[start:stop] = product_back(weight, scaled, transposed=ctx.transposed)
            if mask is None:
                dx[start:stop].addmm_(e, low, alpha=scale)
            else:
                dx[start:stop].addcmul_(torch.mm(e, low), mask, value=scale)
            if first is not None:
                dx[start:stop].addmm_(torch.mm(scaled, first[1]), first[0], alpha=-scale)
    given = None if dx is None else dx.view(x.shape).to(x.dtype)
    return given, None, None, da.to(a.dtype), db.to(b.dtype), dk.to(gain.dtype), *(None,) * 6


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
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    mask: Tensor | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """The plain form, differentiated by autograd; `mask` like x holds dropout's factors."""
    dropped = x if mask is None else x * mask
    y = F.linear(x, weight) + scale * F.linear(F.linear(dropped, a), b)
    y = y if start is None else y - scale * F.linear(F.linear(x, start[0]), start[1])
    y = y if gain is None else y * gain
    return y if bias is None else y + bias
