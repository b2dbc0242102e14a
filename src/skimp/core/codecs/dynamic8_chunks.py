"""Dynamic 8-bit in torch, chunk by chunk with preallocated scratch: the reference that the operators run.

Nothing here allocates but 0-dim scalars, so that an operator built of it can state its workspace to the byte.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from skimp.core.codecs.dynamic8_lookup import BINS, FIRST_BIN, lookup
from skimp.core.codecs.dynamic8_map import codebook, zero_code

BLOCK = 256

#: Elements per chunk of the references: a multiple of BLOCK; 21 bytes of scratch each (see
#: `_encode_workspace`).
CHUNK = 2**16


class Tables:
    """Codebook and look-up of one map as tensors. On a CPU they share cached arrays: no allocation."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        entries, start, middle = _writeable(signed)
        self.entries, self.start, self.middle = (torch.from_numpy(a).to(device) for a in (entries, start, middle))
        self.zero_code = zero_code(signed)

    @staticmethod
    def nbytes(device: torch.device) -> int:
        """What they allocate: (256 + 2·BINS + 256) · 4 bytes off the CPU, nothing on it."""
        return 0 if device.type == "cpu" else 4 * (512 + 2 * BINS)


@cache
def _writeable(signed: bool) -> tuple[numpy.ndarray[Any, Any], ...]:
    """Copies that torch can wrap without warning of read-only memory."""
    return (codebook(signed).copy(), *lookup(signed))


class Scratch:
    """Preallocated buffers of the references for chunks of `size` elements (a multiple of BLOCK).

    17 bytes per element: ratio and edge float32, index and other int32, mask bool; 5 per block: scale, bool.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.ratio = torch.empty(size, dtype=torch.float32, device=device)
        self.edge = torch.empty(size, dtype=torch.float32, device=device)
        self.index = torch.empty(size, dtype=torch.int32, device=device)
        self.other = torch.empty(size, dtype=torch.int32, device=device)
        self.mask = torch.empty(size, dtype=torch.bool, device=device)
        self.scale = torch.empty(size // BLOCK, dtype=torch.float32, device=device)
        self.zero = torch.empty(size // BLOCK, dtype=torch.bool, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        return 17 * size + 5 * (size // BLOCK)


def padded(n: int) -> int:
    """n rounded up to whole blocks."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def encode_chunk(x: Tensor, codes: Tensor, absmax: Tensor, table: Tables, keep_sign: bool, s: Scratch) -> None:
    """Encode one chunk with the scratch only.

    Args:
        x: (padded(n),) float32, zero beyond n; unchanged.
        codes: (n,) uint8, written.
        absmax: (padded(n) / BLOCK,) float32, written.
        keep_sign: a nonzero value whose code would be 0 takes the next code towards its sign, so that a first
            moment keeps its direction and a second moment never becomes 0.
    """
    size, n = x.numel(), codes.numel()
    blocks = size // BLOCK
    ratio, index, scale = s.ratio[:size], s.index[:size], s.scale[:blocks]
    torch.abs(x, out=ratio)
    torch.amax(ratio.view(blocks, BLOCK), dim=1, out=absmax)
    torch.eq(absmax, 0, out=s.zero[:blocks])
    scale.copy_(absmax).masked_fill_(s.zero[:blocks], 1.0)  # a block of zeros: 0 / 1 = 0, and 0 · absmax = 0 back
    torch.div(x.view(blocks, BLOCK), scale.unsqueeze(1), out=ratio.view(blocks, BLOCK))
    find_codes(ratio, index, table, s)
    if keep_sign:
        torch.ne(index, table.zero_code, out=s.mask[:size])
        torch.sign(x, out=ratio)
        index.add_(s.other[:size].copy_(ratio.masked_fill_(s.mask[:size], 0.0)))
    codes.copy_(index[:n])


def find_codes(ratio: Tensor, index: Tensor, table: Tables, s: Scratch) -> None:
    """Codes of `ratio` in [−1, 1] to `index` int32; equal to `torch.bucketize(ratio, midpoints)`."""
    size = ratio.numel()
    bits, other, edge, mask = ratio.view(torch.int32), s.other[:size], s.edge[:size], s.mask[:size]
    torch.bitwise_and(bits, 0x7FFFFFFF, out=other)
    other.bitwise_right_shift_(16).sub_(FIRST_BIN).clamp_(0, BINS - 1)
    torch.bitwise_right_shift(bits, 31, out=index)  # 0, or −1 where negative
    other.sub_(index.mul_(BINS))
    torch.index_select(table.start, 0, other, out=index)
    torch.index_select(table.middle, 0, index, out=edge)
    torch.gt(ratio, edge, out=mask)
    index.add_(other.copy_(mask))


def decode_chunk(codes: Tensor, absmax: Tensor, out: Tensor, table: Tables, s: Scratch) -> None:
    """Decode n codes to `out` (padded(n),) float32; entries beyond n are zero."""
    n, size = codes.numel(), out.numel()
    index = s.index[:size]
    index[:n].copy_(codes)
    index[n:].fill_(0)
    torch.index_select(table.entries, 0, index, out=out)
    out.view(-1, BLOCK).mul_(absmax.unsqueeze(1))
    out[n:].fill_(0.0)
