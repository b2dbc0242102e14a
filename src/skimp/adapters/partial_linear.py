"""A frozen linear layer with a trainable slice, some of its columns or some of its rows: y = x W' + b + slice.

*Columns* S of W (outputs, inputs) read x[:, S] alone, so that is all that is kept of x: tokens x k numbers where a
trained layer keeps tokens x inputs. It is a copy of its own: a view of x would keep the storage of x alive. *Rows* S
need x whole for their gradient; where a fused layer made x, what that one keeps already (`core.remake`).

With G = dL/dy: columns dD = G' x[:, S], rows dD = G[:, S]' x; dx = G W plus the slice's own part. No gradient of W
exists. The slice is a delta D beside the frozen W ("delta"), or lies in W itself ("in place"): the same gradients, the
same weights; a decay pulls a delta to the pretrained numbers and a block in place to 0.

Bytes kept beside W and D: tokens x k (columns), tokens x inputs or nothing (rows), in the dtype of the product.

Paper: "S2FT: Efficient, Scalable and Generalizable LLM Fine-tuning by Structured Sparsity", Yang et al., 2024,
arXiv 2412.06289, section 3.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.core.coded import Base, product, product_back
from skimp.core.remake import Remake, how_made

Side = Literal["columns", "rows"]
#: Which columns or rows: a range [start, stop), or their numbers (k,) int64, each once.
Where = tuple[int, int] | Tensor


def sliced_linear(
    x: Tensor,
    weight: Base,
    bias: Tensor | None,
    block: Tensor,
    where: Where,
    side: Side,
    *,
    transposed: bool = False,
    in_place: bool = False,
) -> Tensor:
    """x W' + bias, W's columns or rows `where` trained through `block`.

    Args:
        x: (…, inputs), float.
        weight: (outputs, inputs), frozen; (inputs, outputs) when `transposed`. Cast where x has another dtype, and no
            copy is kept. Or a `Coded` matrix (outputs, inputs), decoded slice by slice for the products.
        bias: (outputs,) or None, frozen.
        block: D, (outputs, k) for columns, (k, inputs) for rows; its gradient comes in its own dtype.
        where: which. side: what they are.
        in_place: W holds the trained numbers already (`block` is a view of them), nothing is added.

    Returns:
        (…, outputs) in x's dtype, or the autocast dtype where autocast is on, as `nn.Linear` does.
    """
    made = how_made(x) if side == "rows" else None
    y: Tensor = _SlicedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, block, where, side, transposed, in_place, made
    )
    return y


class _SlicedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Base,
        bias: Tensor | None,
        block: Tensor,
        where: Where,
        side: Side,
        transposed: bool,
        in_place: bool,
        made: Remake | None,
    ) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.where, ctx.side, ctx.transposed, ctx.in_place = where, side, transposed, in_place
        ctx.dtype, ctx.shape, ctx.x_dtype, ctx.again = dtype, x.shape, x.dtype, None
        dense = weight if isinstance(weight, Tensor) else None
        ctx.coded = weight if dense is None else None
        with torch.autocast(kind, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(dtype)
            y = product(weight, flat, bias, transposed=transposed)
            if side == "columns":
                part = _taken(flat, where)
                ctx.save_for_backward(dense, block, part)
                if not in_place:
                    y.addmm_(part, block.to(dtype).t())
            else:
                ctx.save_for_backward(dense, block, *((x,) if made is None else made.inputs))
                if made is not None:
                    made.again.readers += 1
                    ctx.again = made.again
                if not in_place:
                    _add_product(y, where, flat, block.to(dtype).t())
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dense, block, *kept = ctx.saved_tensors
        dtype, where = ctx.dtype, ctx.where
        g = upstream.reshape(-1, upstream.shape[-1])
        dx = dblock = None
        if ctx.side == "columns":
            # (k, outputs) first: with the thin side outside, the product is up to three times as fast on a CPU.
            if ctx.needs_input_grad[3]:
                dblock = torch.mm(kept[0].t(), g).t().to(block.dtype).contiguous()
        else:
            x = kept[0] if ctx.again is None else ctx.again(*kept)
            g_part = _taken(g, where)
            if ctx.needs_input_grad[3]:
                dblock = torch.mm(g_part.t(), x.reshape(-1, x.shape[-1]).to(dtype)).to(block.dtype)
            del x
        if ctx.needs_input_grad[0]:
            dx = product_back(dense if ctx.coded is None else ctx.coded, g, transposed=ctx.transposed)
            if not ctx.in_place and ctx.side == "columns":
                _add_product(dx, where, g, block.to(dtype))
            elif not ctx.in_place:
                dx.addmm_(g_part, block.to(dtype))
            dx = dx.view(ctx.shape).to(ctx.x_dtype)
        return dx, None, None, dblock, None, None, None, None, None


def _taken(wide: Tensor, where: Where) -> Tensor:
    """(tokens, k) columns of `wide`, in storage of their own."""
    if isinstance(where, Tensor):
        return wide.index_select(1, where)
    return wide[:, where[0] : where[1]].clone(memory_format=torch.contiguous_format)


def _add_product(target: Tensor, where: Where, left: Tensor, right: Tensor) -> None:
    """target[:, where] += left right, in place."""
    if isinstance(where, Tensor):
        target.index_add_(1, where, torch.mm(left, right))
    else:
        target[:, where[0] : where[1]].addmm_(left, right)


def sliced_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, block: Tensor, index: Tensor, side: Side
) -> Tensor:
    """The plain form on a whole weight, differentiated by autograd."""
    whole = weight.index_add(1 if side == "columns" else 0, index, block)
    return F.linear(x, whole, bias)
