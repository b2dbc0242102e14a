"""A linear layer in spectral form: y = U (sigma * (V' x)) + b, all singular values trained, and of the vectors the
first r; W itself does not exist.

U and V are kept as rows, u (k, outputs) and v (k, inputs), k = min(outputs, inputs), so that the r vectors in training
are the first rows, and their parameters are views of them: a swap moves rows and allocates nothing that stays.

Per token t with g = dL/dy and h = V' x, p = U' g:
    dsigma_i = sum_t p_i h_i        du_i = sum_t h_i g (enhanced)        dv_i = sum_t p_i x (enhanced)
    dx = V (sigma * p)
The true gradients of u_i and v_i hold a factor sigma_i, which starves the small directions; the enhanced ones leave it
out and are formed without it, so sigma_i = 0 divides nothing and such a direction can return.

Kept for backward: x, or what a fused layer made it from (`core.remake`); h (tokens x k) is made again. Products per
token: k (outputs + inputs) forward, twice that and k inputs once more backward, r (outputs + inputs) for the vectors;
a dense layer has outputs x inputs, and twice that. For a square layer both forward and dx cost twice a dense one's.

Paper: "Sparse Spectral Training and Inference on Euclidean and Hyperbolic Neural Networks", Zhao et al., 2024,
arXiv 2405.15481, sections 3.2 and 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.core.remake import Remake, how_made


def spectral_linear(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    sigma: Tensor,
    order: Tensor,
    u_active: Tensor,
    v_active: Tensor,
    bias: Tensor | None = None,
    *,
    enhanced: bool = True,
) -> Tensor:
    """x W' + bias for W = sum_j sigma[order_j] u_j v_j'.

    Args:
        x: (…, inputs), float.
        u: (k, outputs), v: (k, inputs): all vectors, of which the active ones are the first rows.
        sigma: (k,), trained. order: (k,) int64: row j belongs to sigma[order_j].
        u_active: (r, outputs), v_active: (r, inputs): views of the first rows of u and v; gradients go to these.
        bias: (outputs,) or None, trained where it requires gradients.
        enhanced: leave the factor sigma out of the vectors' gradients.

    Returns:
        (…, outputs) in x's dtype, or the autocast dtype where autocast is on.
    """
    y: Tensor = _SpectralLinear.apply(  # type: ignore[no-untyped-call]
        x, u, v, sigma, order, u_active, v_active, bias, enhanced, how_made(x)
    )
    return y


class _SpectralLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        u: Tensor,
        v: Tensor,
        sigma: Tensor,
        order: Tensor,
        u_active: Tensor,
        v_active: Tensor,
        bias: Tensor | None,
        enhanced: bool,
        made: Remake | None,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.save_for_backward(u, v, sigma, *((x,) if made is None else made.inputs))
        if made is not None:
            made.again.readers += 1
        ctx.again = None if made is None else made.again
        ctx.order, ctx.rank, ctx.enhanced, ctx.dtype = order, u_active.shape[0], enhanced, dtype
        with torch.autocast(kind, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(dtype)
            h = torch.mm(flat, v.to(dtype).t()).mul_(sigma.index_select(0, order).to(dtype))
            y = torch.mm(h, u.to(dtype)) if bias is None else torch.addmm(bias.to(dtype), h, u.to(dtype))
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        u, v, sigma, *kept = ctx.saved_tensors
        x = kept[0] if ctx.again is None else ctx.again(*kept)
        dtype, rank = ctx.dtype, ctx.rank
        g = upstream.reshape(-1, upstream.shape[-1])
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        scale = sigma.index_select(0, ctx.order).to(dtype)
        p = torch.mm(g, u.to(dtype).t())
        h = torch.mm(flat, v.to(dtype).t())
        dx = dsigma = du = dv = dbias = None
        if ctx.needs_input_grad[5]:
            du = torch.mm(h[:, :rank].t(), g).to(u.dtype)
        if ctx.needs_input_grad[6]:
            dv = torch.mm(p[:, :rank].t(), flat).to(v.dtype)
        if not ctx.enhanced:
            for grad in (du, dv):
                if grad is not None:
                    grad.mul_(scale[:rank, None])
        if ctx.needs_input_grad[3]:
            dsigma = torch.empty_like(sigma).index_copy_(0, ctx.order, h.mul_(p).sum(0).to(sigma.dtype))
        if ctx.needs_input_grad[7]:
            dbias = g.sum(0)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(p.mul_(scale), v.to(dtype)).view(x.shape).to(x.dtype)
        return dx, None, None, dsigma, None, du, dv, dbias, None, None


def spectral_linear_reference(x: Tensor, u: Tensor, v: Tensor, sigma: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain form with rows in the order of sigma, differentiated by autograd (true gradients)."""
    return torch.nn.functional.linear(x, (u.t() * sigma) @ v, bias)
