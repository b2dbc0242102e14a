"""A second moment as the product of a row and a column: m + n numbers instead of m·n.

Shazeer and Stern, "Adafactor", 2018, arXiv 1804.04235, section 3: with R and C the moving means of g² over rows and
over columns, V̂ = R·Cᵀ / mean(R) is the rank-1 matrix of least I-divergence from V. It is V itself where every g² is a
multiple of one u·vᵀ. Of a vector R alone is kept, which is V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.optim.rowwise import Rows


def average_squares_(sheet: Rows, rows: Tensor, columns: Tensor | None, beta: float, eps: float) -> None:
    """Moving means of g² + eps over each row and over each column: x ← beta·x + (1 − beta)·mean.

    Args:
        rows: (m,); columns: (n,), None for a vector.
    """
    sheet.column.zero_()
    for here in sheet.chunks():
        g, u, _, _ = sheet.read(here)
        torch.mul(g, g, out=u)
        average_chunk_(sheet, here, u.add_(eps), rows, beta)
    average_columns_(sheet, columns, beta)


def average_chunk_(sheet: Rows, here: slice, squares: Tensor, rows: Tensor, beta: float) -> None:
    """The rows of one chunk; its column sums are added to `sheet.column`."""
    row = sheet.row[: here.stop - here.start]
    torch.sum(squares, dim=1, out=row)
    rows[here].mul_(beta).add_(row, alpha=(1.0 - beta) / sheet.columns)
    sheet.column.add_(torch.sum(squares, dim=0, out=sheet.other))


def average_columns_(sheet: Rows, columns: Tensor | None, beta: float) -> None:
    """The columns, once all chunks are summed."""
    if columns is not None:
        columns.mul_(beta).add_(sheet.column, alpha=(1.0 - beta) / sheet.rows)


def mean_row_(sheet: Rows, rows: Tensor) -> None:
    """sheet.total ← mean(R)."""
    sheet.total.zero_()
    for here in sheet.chunks():
        sheet.total.add_(rows[here].sum())
    sheet.total.div_(sheet.rows)


def divide_by_root_(x: Tensor, sheet: Rows, here: slice, rows: Tensor, columns: Tensor | None) -> Tensor:
    """x ← x / √V̂ for the rows `here`; `sheet.total` is mean(R)."""
    row = sheet.row[: here.stop - here.start].copy_(rows[here])
    if columns is not None:
        row.div_(sheet.total)
        x.div_(torch.sqrt(columns, out=sheet.other))
    return x.div_(row.sqrt_().unsqueeze(1))


def limit_(sheet: Rows, rows: Tensor, columns: Tensor | None, largest: float) -> Tensor:
    """The factor 1 / max(1, rms(g / √V̂) / largest) as a new () float64 tensor: no update's rms exceeds `largest`."""
    squares = torch.zeros_like(sheet.total)
    for here in sheet.chunks():
        g, u, _, row = sheet.read(here)
        divide_by_root_(g, sheet, here, rows, columns)
        torch.sum(torch.mul(g, g, out=u), dim=1, out=row)
        squares.add_(row.sum())
    return squares.div_(sheet.rows * sheet.columns).sqrt_().div_(largest).clamp_(min=1.0).reciprocal_()
