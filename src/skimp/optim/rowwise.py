"""Going through a matrix in whole rows with scratch of a fixed size: what rules with statistics of rows and columns
share.

A tensor of more than two dimensions is taken as (all but the last, last); a vector of n as (n, 1), for which a row's
statistic is the number's own. Chunks are whole rows, about 65,536 numbers, and begin at multiples of four, where the
noise of bfloat16 weights does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.workspace import CAST_SCALAR_BYTES
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK
from skimp.optim.elementwise import wide_dtype


def sheet(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) that a shape is taken as."""
    if len(shape) < 2:
        return (shape[0] if shape else 1), 1
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def rows_at_once(rows: int, columns: int) -> int:
    """Rows of a chunk: a multiple of four unless the matrix has fewer."""
    return min(rows, max(4, CHUNK // max(1, columns) // 4 * 4))


class Rows:
    """Scratch and traversal for one matrix.

    Attributes:
        g, u, w: (rows of a chunk, columns) buffers in the dtype of the arithmetic.
        column, other, row: (columns,) twice, and (rows of a chunk,) buffers.
        total: () float64, for sums over the whole matrix.
    """

    #: buffers of a chunk beside the mask
    BUFFERS = 3

    def __init__(self, p: Tensor, g: Tensor, key: int = 0, offset: int = 0) -> None:
        self.rows, self.columns = sheet(tuple(p.shape))
        self.at_once = rows_at_once(self.rows, self.columns)
        self.p, self.gradient = p.view(self.rows, self.columns), g.view(self.rows, self.columns)
        wide, device = wide_dtype(p.dtype), p.device
        self.g, self.u, self.w = (
            torch.empty(self.at_once, self.columns, dtype=wide, device=device) for _ in range(self.BUFFERS)
        )
        self.bad = torch.empty(self.at_once, self.columns, dtype=torch.bool, device=device)
        self.column, self.other = (torch.empty(self.columns, dtype=wide, device=device) for _ in range(2))
        self.row = torch.empty(self.at_once, dtype=wide, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.noise = Noise(self.at_once * self.columns, key, device, offset) if p.dtype == torch.bfloat16 else None

    @classmethod
    def nbytes(cls, p: Tensor, shape: tuple[int, ...] | None = None, offset: int = 0) -> int:
        """Bytes of all buffers, and the scalars torch makes on the way, for `p` gone through as `shape`."""
        rows, columns = sheet(tuple(p.shape) if shape is None else shape)
        at_once, width = rows_at_once(rows, columns), wide_dtype(p.dtype).itemsize
        size = at_once * columns
        noise = Noise.nbytes(size, offset) if p.dtype == torch.bfloat16 else 0
        return (cls.BUFFERS * width + 1) * size + width * (2 * columns + at_once) + 8 + noise + CAST_SCALAR_BYTES

    def chunks(self) -> Iterator[slice]:
        """Slices of rows."""
        for start in range(0, self.rows, self.at_once):
            yield slice(start, min(start + self.at_once, self.rows))

    def read(self, here: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(gradient, scratch u, scratch w, row scratch) of these rows; numbers whose square is not finite are 0, and
        `bad` says where."""
        n = here.stop - here.start
        g, u, bad = self.g[:n], self.u[:n], self.bad[:n]
        g.copy_(self.gradient[here])
        torch.mul(g, g, out=u)
        u.sub_(u)
        torch.ne(u, 0.0, out=bad)
        g.masked_fill_(bad, 0.0)
        return g, u, self.w[:n], self.row[:n]

    def write(self, here: slice, move: Tensor, decay: float, step: int) -> None:
        """p ← decay·p − move; where the gradient was not finite p stays. Call after `read` of the same rows.

        `move` is one of the buffers but not `w`; it is overwritten.
        """
        n = here.stop - here.start
        w, bad = self.w[:n], self.bad[:n]
        w.copy_(self.p[here])
        move.neg_().add_(w, alpha=decay)
        torch.where(bad, w, move, out=w)
        if self.noise is not None:
            self.noise.draw(2 * step, here.start * self.columns)
            round_bits_(w.view(-1), self.noise.high(w.numel()))
        self.p[here].copy_(w)
