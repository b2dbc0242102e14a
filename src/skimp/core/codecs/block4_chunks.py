"""4-bit blocks in torch, chunk by chunk with preallocated scratch: the reference that the operators run.

Two codes share a byte: in a block of 128, byte j has number j in its lower half and number j + 64 in its upper half.
Both halves are then runs of neighbours, which needs no shuffling in any form of the kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from skimp.core.codecs.block4_map import BLOCK4, codebook4, ladder4, midpoints4
from skimp.core.codecs.dynamic8_chunks import Scratch, Tables, find_codes
from skimp.core.codecs.dynamic8_lookup import BINS, lookup_of

HALF = BLOCK4 // 2


class Tables4(Tables):
    """Codebook and look-up of the signed map as tensors; on a CPU they share cached arrays: no allocation."""

    def __init__(self, device: torch.device) -> None:
        self.entries, self.start, self.middle = (torch.from_numpy(a).to(device) for a in _writeable())
        self.zero_code = 7

    @staticmethod
    def nbytes(device: torch.device) -> int:
        """What they allocate off the CPU."""
        return 0 if device.type == "cpu" else 4 * (16 + 2 * BINS + 16)


class Ladder4(Tables4):
    """The same for rounding at random: a look-up of the entry below, and `rise`, how steps are measured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.start, self.middle, self.rise = (torch.from_numpy(a).to(device) for a in _steps())

    @staticmethod
    def nbytes(device: torch.device) -> int:
        """What they allocate off the CPU."""
        return Tables4.nbytes(device) + (0 if device.type == "cpu" else 4 * 15)


@cache
def _writeable() -> tuple[numpy.ndarray[Any, Any], ...]:
    return (codebook4(True).copy(), *lookup_of(midpoints4(True)))


@cache
def _steps() -> tuple[numpy.ndarray[Any, Any], ...]:
    return (*lookup_of(codebook4(True)[1:]), ladder4().copy())


def padded4(n: int) -> int:
    """n rounded up to whole blocks."""
    return (n + BLOCK4 - 1) // BLOCK4 * BLOCK4


def encode4_chunk(
    x: Tensor, codes: Tensor, absmax: Tensor, table: Tables4 | None, s: Scratch, noise: Tensor | None = None
) -> None:
    """Encode one chunk with the scratch only.

    Args:
        x: (whole blocks,) float32, zero beyond the last number; unchanged.
        codes: (x / 2,) uint8 and absmax: (x / 128,) float32, written.
        table: of the signed map; None for the unsigned one, whose codes are arithmetic.
        noise: (x,) int32 in [0, 2**16) rounds at random to one of the two entries about a number, so that its mean is
            kept; `table` is then a `Ladder4`. None rounds to the nearest.
    """
    size = x.numel()
    blocks = size // BLOCK4
    ratio, index, scale = s.ratio[:size], s.index[:size], s.edge[:blocks]
    torch.abs(x, out=ratio)
    torch.amax(ratio.view(blocks, BLOCK4), dim=1, out=absmax)
    torch.eq(absmax, 0, out=s.mask[:blocks])
    scale.copy_(absmax).masked_fill_(s.mask[:blocks], 1.0)
    torch.div(x.view(blocks, BLOCK4), scale.unsqueeze(1), out=ratio.view(blocks, BLOCK4))
    if table is not None:
        find_codes(ratio, index, table, s)
        if noise is not None:
            _climb(ratio, index, table, s, noise)
    else:
        ratio.mul_(16.0).sub_(0.5).ceil_().sub_(1.0).clamp_(0.0, 15.0)  # a midpoint goes to the smaller entry
        index.copy_(ratio)
    halves = index.view(blocks, 2, HALF)
    packed = s.other[: size // 2].view(blocks, HALF)
    torch.mul(halves[:, 1], 16, out=packed)
    codes.view(blocks, HALF).copy_(packed.add_(halves[:, 0]))


def _climb(ratio: Tensor, index: Tensor, table: Tables4, s: Scratch, noise: Tensor) -> None:
    """`index`, the entry below each ratio, goes up by one with the probability that keeps the mean."""
    assert isinstance(table, Ladder4)
    size = ratio.numel()
    edge, mask = s.edge[:size], s.mask[:size]
    torch.index_select(table.entries, 0, index, out=edge)
    ratio.sub_(edge)
    torch.index_select(table.rise, 0, index, out=edge)
    ratio.mul_(edge)
    torch.gt(ratio, edge.copy_(noise), out=mask)
    index.add_(s.other[:size].copy_(mask))


def decode4_chunk(codes: Tensor, absmax: Tensor, out: Tensor, table: Tables4 | None, s: Scratch) -> None:
    """Decode whole blocks to `out` float32; numbers beyond the last one decode to what was encoded there, not to 0."""
    size = out.numel()
    blocks = size // BLOCK4
    packed = s.other[: size // 2].view(blocks, HALF)
    packed.copy_(codes.view(blocks, HALF))
    halves = s.index[:size].view(blocks, 2, HALF)
    torch.bitwise_and(packed, 15, out=halves[:, 0])
    torch.bitwise_right_shift(packed, 4, out=halves[:, 1])
    if table is not None:
        torch.index_select(table.entries, 0, s.index[:size], out=out)
    else:
        out.copy_(s.index[:size]).add_(1.0).mul_(0.0625)
    out.view(blocks, BLOCK4).mul_(absmax.unsqueeze(1))
