"""Norms with a frozen gain, and softmax, that keep 4 bits a number for backward; rules as in `derivative`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.activations import derivative_fused as fused
from skimp.activations.derivative import Coding, Plain, wide
from skimp.activations.derivative_codes import code_blocks, is_native, pack, unpack, value_of_blocks
from skimp.core.errors import SkimpError


def norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
    offset: float = 0.0,
    coding: Coding | None = None,
    plain: Plain | None = None,
) -> Tensor:
    """(gain + offset) (x - [mean]) / deviation + bias over the last dimension, keeping the normalised x coded.

    Args:
        x: (…, n). gain: (n,), frozen. bias: (n,) or None; may train.
        centred: LayerNorm; False is RMSNorm. offset: 1 for norms that store their gain less 1 (Gemma).
        plain: the forward, of x alone.

    Raises:
        SkimpError: a gain that trains: its gradient needs the normalised x as it is.
    """
    if gain.requires_grad:
        raise SkimpError(
            "a norm that keeps its input in 4 bits",
            "its gain trains",
            "the gain's gradient would be as coarse as the codes",
            "freeze the gain, or leave the norm as it is",
        )
    y: Tensor = _Norm.apply(x, gain, bias, eps, centred, offset, coding or Coding(), plain)  # type: ignore[no-untyped-call]
    return y


def normalised(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(normalised x, 1 / deviation (…, 1)) in float32 at least."""
    x = wide(x)
    shifted = x - x.mean(-1, keepdim=True) if centred else x
    scale = torch.rsqrt(shifted.pow(2).mean(-1, keepdim=True) + eps)
    return shifted * scale, scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: float,
        coding: Coding,
        plain: Plain | None,
    ) -> Tensor:
        ctx.centred, ctx.offset, ctx.coding = centred, offset, coding
        if coding.bits == 16:
            ctx.save_for_backward(gain, *normalised(x, eps, centred))
        elif is_native(wide(x)):
            ctx.save_for_backward(gain, *fused.norm_code(wide(x), eps, centred))
        else:
            unit, scale = normalised(x, eps, centred)
            ctx.save_for_backward(gain, *code_blocks(unit.reshape(-1, x.shape[-1])), scale.reshape(-1))
        if plain is not None:
            return plain(x)
        y = normalised(x, eps, centred)[0] * (gain + offset)
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gain, *kept = ctx.saved_tensors
        g = wide(dy.contiguous())
        w = wide(gain) + ctx.offset if ctx.offset else wide(gain)
        dx = db = None
        if ctx.needs_input_grad[2]:
            db = g.reshape(-1, g.shape[-1]).sum(0).to(gain.dtype)
        if ctx.needs_input_grad[0]:
            if ctx.coding.bits != 16 and is_native(g, w):
                dx = fused.norm_back(g, w, *kept, ctx.centred).to(dy.dtype)
            else:
                dx = self_made(ctx, g * w, kept).to(dy.dtype)
        return dx, None, db, None, None, None, None, None


def self_made(ctx: Any, u: Tensor, kept: list[Tensor]) -> Tensor:
    """A norm's gradient in torch: scale (u - [mean u] - xh mean(u xh))."""
    if ctx.coding.bits == 16:
        unit, scale = kept
    else:
        codes, most, scale = kept
        unit = value_of_blocks(codes, most, u.shape[-1]).view(u.shape)
        scale = scale.view(*u.shape[:-1], 1)
    dx = u - unit * (u * unit).mean(-1, keepdim=True)
    return (dx - u.mean(-1, keepdim=True) if ctx.centred else dx) * scale


# ---- softmax, for attention that is written out

#: Shares of a row's largest probability: 15 powers of 2 ^ -0.75, and 0.
SHARES = (0.0, *(2.0 ** (-0.75 * k) for k in range(14, -1, -1)))


def softmax(x: Tensor, coding: Coding | None = None) -> Tensor:
    """softmax over the last dimension, keeping the probabilities in 4 bits a number and a float32 a row.

    For attention that builds its scores. A fused attention keeps none of them, and should stay.
    """
    y: Tensor = _Softmax.apply(x, coding or Coding())  # type: ignore[no-untyped-call]
    return y


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coding: Coding) -> Tensor:
        p = torch.softmax(x, -1)
        ctx.coding = coding
        if coding.bits == 16:
            ctx.save_for_backward(p)
        else:
            most = p.amax(-1, keepdim=True)
            shares = torch.tensor(SHARES, dtype=p.dtype, device=p.device)
            index = torch.bucketize(p / most, (shares[1:] + shares[:-1]) / 2)
            ctx.save_for_backward(pack(index), most.float())
        return p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if ctx.coding.bits == 16:
            (p,) = ctx.saved_tensors
        else:
            codes, most = ctx.saved_tensors
            shares = torch.tensor(SHARES, dtype=dy.dtype, device=dy.device)
            p = shares[unpack(codes, dy.shape[-1])] * most.to(dy.dtype)
            p = p / p.sum(-1, keepdim=True)  # its rows sum to 1 again
        return p * (dy - (dy * p).sum(-1, keepdim=True)), None
