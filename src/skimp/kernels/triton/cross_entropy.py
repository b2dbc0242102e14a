"""Cross-entropy and log-probabilities of logits in Triton: the rows of `skimp.kernels.cross_entropy`, one a program.

A label outside the vocabulary gives the loss NaN and no gradient: a card cannot raise in the middle of its work.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from skimp.kernels import cross_entropy as plain
from skimp.kernels.triton.launch import piece
from skimp.kernels.triton.softmax import capped, level_of


@triton.jit
def _forward(
    x_at, labels_at, loss_at, lse_at, width, cap, smoothing, z_loss, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = program.to(tl.int64) * width
    top, total, summed = level_of(x_at, row, width, cap, CAPPED, BLOCK)
    lse = top + tl.log(total)
    label = tl.load(labels_at + program)
    known = (label >= 0) & (label < width)
    # One number as a block of one: `capped` takes blocks.
    at = x_at + row + tl.where(known, label, 0) + tl.arange(0, 1)
    target, _ = capped(tl.load(at).to(tl.float32), cap, CAPPED)
    loss = lse - (1.0 - smoothing) * tl.sum(target, 0) - smoothing / width * summed + z_loss * lse * lse
    tl.store(loss_at + program, tl.where(known, loss, float("nan")))
    tl.store(lse_at + program, lse)


@triton.jit
def _backward(
    x_at, labels_at, lse_at, up_at, dx_at, width, cap, smoothing, z_loss, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = program.to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    lse, up, label = tl.load(lse_at + program), tl.load(up_at + program), tl.load(labels_at + program)
    by = up * (1.0 + 2.0 * z_loss * lse)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x, slope = capped(tl.load(x_at + row + start + columns, mask=inside, other=0.0).to(tl.float32), cap, CAPPED)
        # The target is subtracted in float32, before the one rounding.
        dx = by * tl.exp(x - lse) - up * smoothing / width
        dx -= tl.where(start + columns == label, up * (1.0 - smoothing), 0.0)
        tl.store(dx_at + row + start + columns, (dx * slope).to(dx_at.dtype.element_ty), mask=inside)


class TritonRows:
    """The rows of `skimp.kernels.cross_entropy.CrossEntropy` in Triton; `dx` may be `x`, a row is read before."""

    @staticmethod
    def forward(x: Tensor, labels: Tensor, cap: float, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
        """(N, V) logits → unweighted losses and log-sum-exps, (N,) float32."""
        rows, width = x.shape
        loss, lse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
        _forward[(rows,)](x, labels, loss, lse, width, cap, smoothing, z_loss, cap > 0, piece(width))
        return loss, lse

    @staticmethod
    def backward(
        x: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, dx: Tensor, cap: float, smoothing: float, z: float
    ) -> None:
        """`dx` is written."""
        rows, width = x.shape
        _backward[(rows,)](x, labels, lse, upstream, dx, width, cap, smoothing, z, cap > 0, piece(width))


def cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """As `skimp.kernels.cross_entropy.cross_entropy`."""
    return plain.cross_entropy(logits, labels, form=TritonRows, **options)


def log_probs(logits: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
    """As `skimp.kernels.cross_entropy.log_probs`."""
    return plain.log_probs(logits, labels, softcap, form=TritonRows)
