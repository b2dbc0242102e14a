"""Point approximation: rows of a matrix as multiples of a few sampled rows, and a product that never makes them again.

Of X (b, n) k rows are drawn as generators C. Row i is kept as the generator f(i) it is most alike (by the size of the
cosine) and the factor α(i) with which that is nearest: α·C_f is the projection of X_i on the line of C_f. Then

    Xᵀ·dY ≈ β·Cᵀ·B,   B_j = the sum of α(i)·dY_i over the rows i with f(i) = j

costs b·m + k·n·m multiplications and not b·n·m. With eps, rows that are further than eps·‖X_i‖ from their multiple are
dropped and β = b / (rows kept) makes up for them; without it every row is kept and β = 1. A row of zeros has α = 0.

Exact with every row a generator, and where all rows lie on the lines of generators. Without eps it is biased by what
the generators do not span: it lives on the redundancy of rows. With an eps that only keeps the generators themselves
it is uniform sampling of rows, without bias.

Paper: "QKV Projections Require a Fraction of Their Memory", Khalaf et al., 2025 (ICLR 2026), arXiv 2506.02939 (PAMM).
The distance that eps judges is computed as a distance; √(1 − cos²) loses the generators themselves below 1e-3 in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skimp.core.noise import random_uint32
from skimp.core.repeat import rounds

#: Rows that are compared with all generators at once.
PIECE = 1024
#: Generators from which on an index takes four bytes.
SMALL = 2**15


@dataclass(frozen=True)
class Points:
    """What is kept of X (b, n).

    Attributes:
        generators: (k, n) rows of X, in its dtype.
        index: (b,) int16, int32 from 32,768 generators on: the generator of each row.
        factor: (b,) α, in X's dtype; 0 for rows that are dropped.
        weight: () β in the dtype of the arithmetic; None for 1.
    """

    generators: Tensor
    index: Tensor
    factor: Tensor
    weight: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All of it, in order."""
        every = (self.generators, self.index, self.factor)
        return every if self.weight is None else (*every, self.weight)


def count_of(rows: int, one_of: int) -> int:
    """Generators for so many rows: one of `one_of`, rounded up."""
    return max(1, -(-rows // one_of))


def nbytes(rows: int, width: int, one_of: int, itemsize: int, gated: bool = False) -> int:
    """Bytes of what is kept of `rows` rows of `width` numbers of `itemsize` bytes (float32 or narrower)."""
    k = count_of(rows, one_of)
    return k * width * itemsize + rows * (itemsize + (2 if k < SMALL else 4)) + (4 if gated else 0)


def draw_rows(rows: int, count: int, seed: int, name: str, first: int, stream: int, like: Tensor) -> Tensor:
    """(count,) int64: different rows of `rows`, all sets alike likely, from addressed noise."""
    words = random_uint32(seed, name, first, rows, stream=stream, device=like.device)
    # Whole numbers of 32 bits are exact in float64, whose sort takes no scratch that a simulation does not see.
    return torch.argsort(words.double(), stable=True)[:count]


def compress(x: Tensor, chosen: Tensor, eps: float | None = None) -> Points:
    """Points of x (b, n) with the rows `chosen` (k,) for generators.

    Args:
        eps: the largest distance of a kept row from its multiple, as a part of its length; None keeps every row.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    (rows, _), k = x.shape, chosen.shape[0]
    generators = x.index_select(0, chosen)
    wide = generators.to(work)
    lengths = torch.linalg.vector_norm(wide, dim=1).clamp_min_(torch.finfo(work).tiny)
    units = wide / lengths.unsqueeze(1)
    index = torch.empty(rows, dtype=torch.int16 if k < SMALL else torch.int32, device=x.device)
    factor = torch.empty(rows, dtype=x.dtype, device=x.device)
    kept = None if eps is None else torch.zeros((), dtype=work, device=x.device)
    for start in rounds(range(0, rows, PIECE)):
        piece = x[start : start + PIECE].to(work)
        along = torch.mm(piece, units.t())  # of one row its length is one and the same: cosines need not be formed
        best = along.abs().argmax(1)
        share = along.gather(1, best.unsqueeze(1)).squeeze(1).div_(lengths.index_select(0, best))
        if kept is not None and eps is not None:
            off = torch.linalg.vector_norm(piece - wide.index_select(0, best) * share.unsqueeze(1), dim=1)
            near = off <= eps * torch.linalg.vector_norm(piece, dim=1)
            share.mul_(near)
            kept.add_(near.sum())
        index[start : start + PIECE].copy_(best)
        factor[start : start + PIECE].copy_(share)
    if kept is None:
        return Points(generators, index, factor)
    return Points(generators, index, factor, torch.where(kept > 0, rows / kept.clamp_min(1.0), kept))


def sums_of(points: Points, dy: Tensor) -> Tensor:
    """B (k, m) times β, summed in float32 (float64 of float64): Xᵀ·dY ≈ Cᵀ·B."""
    work = torch.promote_types(dy.dtype, torch.float32)
    sums = torch.zeros(points.generators.shape[0], dy.shape[1], dtype=work, device=dy.device)
    for start in rounds(range(0, dy.shape[0], PIECE)):
        stop = start + PIECE
        moves = dy[start:stop].to(work) * points.factor[start:stop].to(work).unsqueeze(1)
        where = points.index[start:stop].to(torch.int64)
        if dy.device.type == "cpu":
            sums.index_add_(0, where, moves)
        else:  # sorted by row and then summed: atomic additions would come in another order each time
            sums.index_put_((where,), moves, accumulate=True)
    return sums if points.weight is None else sums.mul_(points.weight)


def weight_gradient(points: Points, dy: Tensor, columns: bool = False) -> Tensor:
    """(m, n) ≈ dYᵀ·X of dy (b, m), in the dtype of the sums; (n, m) for a weight that stores outputs as columns."""
    sums = sums_of(points, dy)
    wide = points.generators.to(sums.dtype)
    return torch.mm(wide.t(), sums) if columns else torch.mm(sums.t(), wide)
