"""Row norms of V = W + Σ s B A without ever forming it, and what they do to an adapted layer.

A weight-normalised layer computes diag(m / c) V x, with m trained and c_i = ||V_i||, the norm of what feeds output i.
With P = W A' (outputs x r) and M = A A' (r x r)

    c_i² = ||W_i||² + Σ_j s B_ij (2 P_ij + s (B M)_ij)

so the work is one thin product with W and no tensor of W's size exists. Rows of a half-precision W are widened a slice
at a time. Gradients, with q = dc / c: dB = s diag(q) V A', dA = s (diag(q) B)' V, again through thin products alone.

DoRA takes no gradient through c (section 4.3 of its paper); GradNormLoRP does (gradient weight normalisation).

Papers: "DoRA: Weight-Decomposed Low-Rank Adaptation", Liu et al., 2024, arXiv 2402.09353, sections 4.1 and 4.3;
"Gradient Weight-normalized Low-rank Projection for Efficient LLM Training", Huang et al., 2024, arXiv 2412.19616,
section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.core.coded import Base, dense_rows
from skimp.core.repeat import rounds

#: (A, B, s): one product s B A. The first of several is the trained one.
Pair = tuple[Tensor, Tensor, float]
#: Numbers of W that are widened at once: 1 Mi, 4 MiB in float32.
NUMBERS = 2**20


def row_norms(weight: Base, pairs: Sequence[Pair], *, transposed: bool = False) -> Tensor:
    """(outputs,) norms of the rows of W + Σ s B A, in the dtype of A, with gradients for the first pair.

    Args:
        weight: (outputs, inputs), frozen, or in the parts of a codec. transposed: it is stored (inputs, outputs).
        pairs: A (r, inputs) and B (outputs, r) with their factor s.
    """
    (a, b, scale), *others = pairs
    flat = [t for low, up, _ in others for t in (low, up)]
    norms: Tensor = _RowNorms.apply(weight, transposed, a, b, scale, [s for _, _, s in others], *flat)  # type: ignore[no-untyped-call]
    return norms


class _RowNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Base,
        transposed: bool,
        a: Tensor,
        b: Tensor,
        scale: float,
        scales: list[float],
        *others: Tensor,
    ) -> Tensor:
        low, up = _stacked(a, b, scale, scales, others)
        thin, square = low.new_empty(up.shape[0], low.shape[0]), low.new_empty(up.shape[0])
        for start, stop, rows in _slices(weight, transposed, low.dtype):
            torch.mm(rows, low.t(), out=thin[start:stop])
            torch.linalg.vector_norm(rows, dim=1, out=square[start:stop])
        square.square_()
        square.add_((up * (2.0 * thin + up @ (low @ low.t()))).sum(1))
        norms = square.clamp_min_(torch.finfo(square.dtype).tiny).sqrt_()
        dense = weight if isinstance(weight, Tensor) else None
        ctx.coded, ctx.transposed = weight if dense is None else None, transposed
        ctx.save_for_backward(dense, a, b, norms, *others)
        ctx.scale, ctx.scales = scale, scales
        return norms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dense, a, b, norms, *others = ctx.saved_tensors
        weight = dense if ctx.coded is None else ctx.coded
        scale = ctx.scale
        low, up = _stacked(a, b, scale, ctx.scales, others)
        turned = (upstream / norms).unsqueeze(1) * b
        db, da = low.new_empty(b.shape), torch.mm(torch.mm(turned.t(), up), low)
        for start, stop, rows in _slices(weight, ctx.transposed, low.dtype):
            torch.mm(rows, a.t(), out=db[start:stop])
            da.addmm_(turned[start:stop].t(), rows)
        db.addmm_(up, low @ a.t()).mul_((upstream / norms).unsqueeze(1)).mul_(scale)
        return (None, None, da.mul_(scale), db, None, None, *(None for _ in others))


def _stacked(
    a: Tensor, b: Tensor, scale: float, scales: Sequence[float], others: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """All A one above the other, all s B side by side."""
    if not others:
        return a, scale * b
    ups = [scale * b, *(s * up for s, up in zip(scales, others[1::2], strict=True))]
    return torch.cat([a, *others[0::2]]), torch.cat(ups, 1)


def _slices(weight: Base, transposed: bool, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, rows in `dtype`): the whole of W at once where it has that dtype already."""
    count = weight.shape[1] if transposed else weight.shape[0]
    whole = isinstance(weight, Tensor) and weight.dtype == dtype
    size = count if whole else max(1, NUMBERS * count // weight.numel())
    for start in rounds(range(0, count, size)):
        stop = min(start + size, count)
        yield start, stop, dense_rows(weight, start, stop, dtype, transposed=transposed)
