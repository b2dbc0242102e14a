"""Block-wise dynamic 8-bit: 1 + 4/256 = 1.0156 bytes per element.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv 2110.02861, sections 2.1
and 2.2 (blocks of 256 as in bitsandbytes, the paper has 2,048). The tensor is read row-major in blocks; with
a = max|block| each element is stored as the index of the codebook entry nearest to x / a, and read back as
entry · a. The codebook spends its 8 bits on seven decades: near 1 a step is 1.4 % (signed) or 0.7 %
(unsigned) of a, and the smallest magnitude is 5.5e-7 (3.25e-7) of a.

Codebooks, absmax and codes equal those of bitsandbytes but for values within an ulp of a midpoint, where the
direction is a matter of division against multiplication by the reciprocal. Here it is division, so that a
block whose maximum is denormal still encodes right; an exact midpoint goes to the smaller entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.codecs.dynamic8_lookup import BINS, FIRST_BIN, lookup
from skimp.core.codecs.dynamic8_map import codebook, zero_code
from skimp.core.errors import SkimpError
from skimp.core.forms import native_form
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace

BLOCK = 256

#: Elements per chunk of the references: a multiple of BLOCK; 21 bytes of scratch each (see
#: `_encode_workspace`).
CHUNK = 2**16


class Tables:
    """Codebook and look-up of one map as tensors. On a CPU they share cached arrays: no allocation."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        entries, start, middle = _writeable(signed)
        self.entries, self.start, self.middle = (
            torch.from_numpy(a).to(device) for a in (entries, start, middle)
        )
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


def encode_chunk(
    x: Tensor, codes: Tensor, absmax: Tensor, table: Tables, keep_sign: bool, s: Scratch
) -> None:
    """Encode one chunk with the scratch only.

    Args:
        x: (padded(n),) float32, zero beyond n; unchanged.
        codes: (n,) uint8, written.
        absmax: (padded(n) / BLOCK,) float32, written.
        keep_sign: a nonzero value whose code would be 0 takes the next code towards its sign, so that a first
            moment never loses its direction.
    """
    size, n = x.numel(), codes.numel()
    blocks = size // BLOCK
    ratio, index, scale = s.ratio[:size], s.index[:size], s.scale[:blocks]
    torch.abs(x, out=ratio)
    torch.amax(ratio.view(blocks, BLOCK), dim=1, out=absmax)
    torch.eq(absmax, 0, out=s.zero[:blocks])
    scale.copy_(absmax).masked_fill_(
        s.zero[:blocks], 1.0
    )  # a block of zeros: 0 / 1 = 0, and 0 · absmax = 0 back
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


@torch.library.custom_op(
    "skimp::dynamic8_encode",
    mutates_args=(),
    schema="(Tensor x, bool signed, bool keep_sign) -> (Tensor, Tensor)",
)
def _encode(x: Tensor, signed: bool, keep_sign: bool) -> tuple[Tensor, Tensor]:
    codes, absmax = _empty_parts(x)
    form = native_form("dynamic8_encode", x.device)
    if form is not None and x.dtype == torch.float32:
        form(x, codes, absmax, signed, keep_sign)
        return codes, absmax
    flat, flat_codes, n = x.view(-1), codes.view(-1), x.numel()
    chunk = min(CHUNK, padded(n))
    values, scratch = torch.empty(chunk, dtype=torch.float32, device=x.device), Scratch(chunk, x.device)
    table = Tables(signed, x.device)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        size = padded(stop - start)
        values[: stop - start].copy_(flat[start:stop])
        values[stop - start : size].fill_(0.0)
        first = start // BLOCK
        encode_chunk(
            values[:size],
            flat_codes[start:stop],
            absmax[first : first + size // BLOCK],
            table,
            keep_sign,
            scratch,
        )
    return codes, absmax


def _empty_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(padded(x.numel()) // BLOCK, dtype=torch.float32, device=x.device)


@_encode.register_fake
def _encode_fake(x: Tensor, signed: bool, keep_sign: bool) -> tuple[Tensor, Tensor]:
    return _empty_parts(x)


@declare_workspace("skimp::dynamic8_encode")
def _encode_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    x = args[0]
    if x.numel() == 0 or (x.dtype == torch.float32 and native_form("dynamic8_encode", x.device) is not None):
        return 0
    chunk = min(CHUNK, padded(x.numel()))
    return 4 * chunk + Scratch.nbytes(chunk) + Tables.nbytes(x.device) + CAST_SCALAR_BYTES


@torch.library.custom_op(
    "skimp::dynamic8_decode",
    mutates_args=(),
    schema="(Tensor codes, Tensor absmax, bool signed, ScalarType dtype) -> Tensor",
)
def _decode(codes: Tensor, absmax: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    form = native_form("dynamic8_decode", codes.device)
    if form is not None and dtype == torch.float32:
        form(codes, absmax, out, signed)
        return out
    flat, target, n = codes.view(-1), out.view(-1), codes.numel()
    chunk = min(CHUNK, padded(n))
    values, scratch = (
        torch.empty(chunk, dtype=torch.float32, device=codes.device),
        Scratch(chunk, codes.device),
    )
    table = Tables(signed, codes.device)
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        size, first = padded(stop - start), start // BLOCK
        decode_chunk(flat[start:stop], absmax[first : first + size // BLOCK], values[:size], table, scratch)
        target[start:stop].copy_(values[: stop - start])
    return out


@_decode.register_fake
def _decode_fake(codes: Tensor, absmax: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


@declare_workspace("skimp::dynamic8_decode")
def _decode_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    codes, _, _, dtype = args
    if codes.numel() == 0 or (
        dtype == torch.float32 and native_form("dynamic8_decode", codes.device) is not None
    ):
        return 0
    chunk = min(CHUNK, padded(codes.numel()))
    return 4 * chunk + Scratch.nbytes(chunk) + Tables.nbytes(codes.device)


@dataclass(frozen=True)
class Dynamic8:
    """Parts: "codes" uint8 shaped like the tensor, "absmax" float32 (⌈n/256⌉,).

    Error ≤ 0.0071·absmax signed for positive x (0.0141 at the negative end, which has no −1), 0.0036
    unsigned. An infinity or NaN makes the absmax of its block non-finite, which `finite` reports without any
    value being read while encoding; such a block decodes to NaN as a whole.

    Args:
        signed: the map with negative entries; False for second moments.
        keep_sign: see `encode_chunk`.
    """

    name: ClassVar[str] = "dynamic8"
    block: ClassVar[int] = BLOCK
    signed: bool = True
    keep_sign: bool = False

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        check_floating(self.name, x)
        codes, absmax = _encode(x.contiguous(), self.signed, self.keep_sign)
        return {"codes": codes, "absmax": absmax}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, absmax, n = parts["codes"], parts["absmax"], count(shape)
        if codes.numel() != n or absmax.numel() != padded(n) // BLOCK:
            raise SkimpError(
                f"codec 'dynamic8' decoding to {tuple(shape)}",
                f"{codes.numel()} codes and {absmax.numel()} block maxima",
                f"{n} elements need {n} codes and {padded(n) // BLOCK} maxima",
                "pass the shape that was encoded",
            )
        return _decode(codes.contiguous(), absmax.contiguous(), self.signed, dtype).view(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        n = count(shape)
        return n + 4 * (padded(n) // BLOCK)

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["absmax"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "signed": self.signed, "keep_sign": self.keep_sign}
