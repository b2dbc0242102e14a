"""Block-wise 4-bit: 1/2 + 4/128 = 0.53 bytes per element.

Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States", 2023, arXiv 2309.01507. The tensor is read row-major
in blocks of 128; with a = max|block| each number is stored as the index of the entry of a 16-entry map nearest to x / a
(`block4_map`), two to a byte. The paper's second moments share a scale by row and by column instead of by block; blocks
need nothing of the rest of the tensor, so that a shard or a step in backward is what the whole is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.codecs.block4_chunks import Tables4, decode4_chunk, encode4_chunk, padded4
from skimp.core.codecs.block4_map import BLOCK4
from skimp.core.codecs.dynamic8_chunks import CHUNK, Scratch
from skimp.core.errors import SkimpError
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace


def _empty_parts(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = torch.empty(padded4(n) // 2, dtype=torch.uint8, device=device)
    return codes, torch.empty(padded4(n) // BLOCK4, dtype=torch.float32, device=device)


@torch.library.custom_op("skimp::block4_encode", mutates_args=(), schema="(Tensor x, bool signed) -> (Tensor, Tensor)")
def _encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    n, flat = x.numel(), x.view(-1)
    codes, absmax = _empty_parts(n, x.device)
    chunk = min(CHUNK, padded4(n))
    values, scratch = torch.empty(chunk, dtype=torch.float32, device=x.device), Scratch(chunk, x.device)
    table = Tables4(x.device) if signed else None
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        size = padded4(stop - start)
        values[: stop - start].copy_(flat[start:stop])
        values[stop - start : size].fill_(0.0)
        maxima = absmax[start // BLOCK4 : (start + size) // BLOCK4]
        encode4_chunk(values[:size], codes[start // 2 : (start + size) // 2], maxima, table, scratch)
    return codes, absmax


@_encode.register_fake
def _encode_fake(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    return _empty_parts(x.numel(), x.device)


@declare_workspace("skimp::block4_encode")
def _encode_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    x, signed = args
    chunk = min(CHUNK, padded4(x.numel()))
    tables = Tables4.nbytes(x.device) if signed else 0
    return 4 * chunk + Scratch.nbytes(chunk) + tables + CAST_SCALAR_BYTES if x.numel() else 0


@torch.library.custom_op(
    "skimp::block4_decode",
    mutates_args=(),
    schema="(Tensor codes, Tensor absmax, int count, bool signed, ScalarType dtype) -> Tensor",
)
def _decode(codes: Tensor, absmax: Tensor, count: int, signed: bool, dtype: torch.dtype) -> Tensor:
    out = torch.empty(count, dtype=dtype, device=codes.device)
    chunk = min(CHUNK, padded4(count))
    values, scratch = torch.empty(chunk, dtype=torch.float32, device=codes.device), Scratch(chunk, codes.device)
    table = Tables4(codes.device) if signed else None
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        size = padded4(stop - start)
        maxima = absmax[start // BLOCK4 : (start + size) // BLOCK4]
        decode4_chunk(codes[start // 2 : (start + size) // 2], maxima, values[:size], table, scratch)
        out[start:stop].copy_(values[: stop - start])
    return out


@_decode.register_fake
def _decode_fake(codes: Tensor, absmax: Tensor, count: int, signed: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=codes.device)


@declare_workspace("skimp::block4_decode")
def _decode_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    codes, _, n, signed, _ = args
    chunk = min(CHUNK, padded4(n))
    tables = Tables4.nbytes(codes.device) if signed else 0
    return 4 * chunk + Scratch.nbytes(chunk) + tables + CAST_SCALAR_BYTES if n else 0


@dataclass(frozen=True)
class Block4:
    """Parts: "codes" uint8 (64 · ⌈n/128⌉,), "absmax" float32 (⌈n/128⌉,).

    Error ≤ 0.1125·absmax signed for x above −0.8875·absmax (0.1125 there too), 1/32·absmax unsigned above 1/16 and
    1/16 below, where no entry is. An infinity or NaN makes the absmax of its block non-finite, which `finite` reports.

    Args:
        signed: the map with negative entries; False for second moments, whose zeros come back as absmax/16.
    """

    name: ClassVar[str] = "block4"
    block: ClassVar[int] = BLOCK4
    signed: bool = True

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        check_floating(self.name, x)
        codes, absmax = _encode(x.contiguous(), self.signed)
        return {"codes": codes, "absmax": absmax}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, absmax, n = parts["codes"], parts["absmax"], count(shape)
        if codes.numel() != padded4(n) // 2 or absmax.numel() != padded4(n) // BLOCK4:
            raise SkimpError(
                f"codec 'block4' decoding to {tuple(shape)}",
                f"{codes.numel()} bytes of codes and {absmax.numel()} block maxima",
                f"{n} elements need {padded4(n) // 2} and {padded4(n) // BLOCK4}",
                "pass the shape that was encoded",
            )
        return _decode(codes.contiguous(), absmax.contiguous(), n, self.signed, dtype).view(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        n = padded4(count(shape))
        return n // 2 + 4 * (n // BLOCK4)

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["absmax"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "signed": self.signed}
