"""A linear layer in codes whose codebooks train: y = x W' + b, weight (i, j) being grid[i, group of j, code].

The codes never change. What trains is a shift of the grids, 2^b numbers for every group of a row:

    W_ij = (C + D)[i, γ(j), Z_ij]      dD[i, γ, k] = Σ over the j of group γ with Z_ij = k of dW_ij,   dW = G' x

so all weights of one code move together, by the sum of their gradients: such a change has full rank in general. C is
the frozen grid, float16 as it was learned, and D (0 at first) is float32: step 0 is the base to the bit, a decay pulls
the weights to where they began, and no update is lost below half a unit of float16.

Neither W nor dW exists whole: both are made a slice of at most 2^20 numbers at a time (`core.coded`). For backward the
input alone is kept, or nothing where a fused layer that made it can make it again.

Source: "Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", Zhang et al., 2025, arXiv 2410.06364,
section 3; that the shift and not the grid is what trains is worked out here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.core.coded import Coded, product, product_back, slice_starts
from skimp.core.remake import Remake, how_made
from skimp.core.repeat import rounds


def moved(base: Coded, shift: Tensor) -> Coded:
    """The base with its grids shifted, in float32 or what is wider of the shift; its codes are the same tensor.

    Args:
        base: of codec `Sketch`. shift: (outputs, groups x 2^b).
    """
    grid = base.parts["grid"]
    kind = torch.promote_types(shift.dtype, torch.float32)
    parts = {**base.parts, "grid": grid.to(kind) + shift.to(kind).view(grid.shape)}
    return Coded(parts, base.codec, base.shape, base.dtype)


def sketched_linear(x: Tensor, base: Coded, shift: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + bias with W's grids shifted; x and shift get gradients.

    Args:
        x: (…, inputs), float. base: (outputs, inputs) in codec `Sketch`, frozen.
        shift: D, (outputs, groups x 2^b), float32 or wider. Its gradient comes in its own dtype: products in that of
            x, sums over a code in float32 at least.
        bias: (outputs,) or None, frozen.

    Returns:
        (…, outputs) in x's dtype, or the autocast dtype where autocast is on.
    """
    y: Tensor = _SketchedLinear.apply(x, base, shift, bias, how_made(x))  # type: ignore[no-untyped-call]
    return y


class _SketchedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Coded, shift: Tensor, bias: Tensor | None, made: Remake | None) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.base, ctx.dtype, ctx.shape, ctx.x_dtype, ctx.again = base, dtype, x.shape, x.dtype, None
        kept: tuple[Tensor, ...] = (x,)
        if made is not None and ctx.needs_input_grad[2]:
            made.again.readers += 1
            ctx.again, kept = made.again, made.inputs
        ctx.save_for_backward(shift, *kept)
        with torch.autocast(kind, enabled=False):
            y = product(moved(base, shift), x.reshape(-1, x.shape[-1]).to(dtype), bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        shift, *kept = ctx.saved_tensors
        g = upstream.reshape(-1, upstream.shape[-1])
        dx = dshift = None
        if ctx.needs_input_grad[2]:
            x = kept[0] if ctx.again is None else ctx.again(*kept)
            dshift = _gradient(ctx.base, g, x.reshape(-1, x.shape[-1]).to(ctx.dtype)).to(shift.dtype)
            del x
        if ctx.needs_input_grad[0]:
            dx = product_back(moved(ctx.base, shift), g).view(ctx.shape).to(ctx.x_dtype)
        return dx, None, dshift, None, None


def _gradient(base: Coded, g: Tensor, x: Tensor) -> Tensor:
    """Sums of dW = g' x by code, (outputs, groups x 2^b); a slice of dW at a time."""
    codec: Any = base.codec
    outputs, shape = base.shape[0], tuple(base.shape)
    grid = base.parts["grid"]
    made = g.new_empty(outputs, grid[0].numel(), dtype=torch.promote_types(g.dtype, torch.float32))
    starts = slice_starts(base)
    for start in rounds(starts):
        stop = min(start + starts.step, outputs)
        gradient = torch.mm(g[:, start:stop].t(), x)
        made[start:stop] = codec.sums(base.parts, shape, start, stop, gradient).view(stop - start, -1)
        del gradient  # before the next is made
    return made


def sketched_linear_reference(x: Tensor, grid: Tensor, codes: Tensor, bias: Tensor | None) -> Tensor:
    """The paper's form, differentiated by autograd: each row of W is its grids times a fixed one-hot matrix.

    Args:
        x: (…, inputs). grid: (outputs, groups, K). codes: (outputs, inputs) int64; column j is in group
            j // ⌈inputs / groups⌉ of equal widths.
    """
    outputs, groups, values = grid.shape
    width = codes.shape[1] // groups
    one_hot = F.one_hot(codes.view(outputs, groups, width), values).to(grid.dtype)
    weight = torch.einsum("ogk,ogwk->ogw", grid, one_hot).reshape(outputs, -1)
    return F.linear(x, weight, bias)
