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
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.codecs.dynamic8_chunks import (
    BLOCK,
    CHUNK,
    Scratch,
    Tables,
    decode_chunk,
    encode_chunk,
    padded,
)
from skimp.core.errors import SkimpError
from skimp.core.forms import native_form
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace


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
    if codes.numel() == 0 or (dtype == torch.float32 and native_form("dynamic8_decode", codes.device) is not None):
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
