"""NF4: 4-bit codes of normally distributed weights, 64 to a block; 4.5 bits a weight, 4.127 with double quantisation.

Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv 2305.14314, sections 2 and 3. The tensor
is read row-major in blocks of 64, the last one may be short; with a = max|block| a weight is the index of the level
nearest to x / a (`nf4_map`). Two codes a byte, the first in the upper half.

Double quantisation codes the maxima themselves: their mean is taken off, and the rest is dynamic 8-bit in blocks of 256
(`dynamic8`), 8 + 32/256 bits a block instead of 32. (The paper says 8-bit floats; what is published, and what this
equals, is the dynamic map.)

Codes, maxima and layout equal those of bitsandbytes, so a packed weight of either is one of the other. The offset is
the mean rounded once, where theirs is as rounded as many float32 sums are; coded maxima next to a border may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.codecs.dynamic8 import Dynamic8
from skimp.core.codecs.nf4_chunks import CHUNK, FEW_ROWS, decode_range, encode_chunk, few_rows
from skimp.core.errors import SkimpError
from skimp.core.forms import native_form
from skimp.core.read import read

NESTED = 256
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class NF4:
    """Parts: "codes" uint8 (⌈n/2⌉,); "absmax" float32 (blocks,), or with `double_quant` "absmax" uint8 (blocks,),
    "nested_absmax" float32 (⌈blocks/256⌉,) and "offset" float32 (1,).

    Error ≤ 0.152 of a block's maximum (half the widest gap); maxima and zeros are exact without double quantisation,
    which moves each maximum by at most 0.0071 of the largest deviation in its 256.

    Args:
        block: weights a maximum, a power of two from 32 to 4,096.
        double_quant: code the maxima too.
    """

    block: int = 64
    double_quant: bool = True
    name: ClassVar[str] = "nf4"

    def __post_init__(self) -> None:
        if self.block not in BLOCKS:
            raise SkimpError("codec 'nf4' with a block of 32 to 4096", f"{self.block}", "", "block 64")

    def spec(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part for a tensor of `shape`."""
        n = count(shape)
        blocks = -(-n // self.block)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": (((n + 1) // 2,), torch.uint8)}
        if not self.double_quant:
            return parts | {"absmax": ((blocks,), torch.float32)}
        nested: tuple[int, ...] = (-(-blocks // NESTED),)
        return parts | {
            "absmax": ((blocks,), torch.uint8),
            "nested_absmax": (nested, torch.float32),
            "offset": ((1,), torch.float32),
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The nearest level of every element, in float32 whatever x's dtype.

        Raises:
            SkimpError: an integer tensor, or a NaN or an infinity in it: its whole block would decode to NaN.
        """
        check_floating(self.name, x)
        flat, n = x.detach().contiguous().view(-1), x.numel()
        blocks = -(-n // self.block)
        codes = torch.empty((n + 1) // 2, dtype=torch.uint8, device=x.device)
        absmax = torch.empty(blocks, dtype=torch.float32, device=x.device)
        form = native_form("nf4_encode", x.device)
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            part = flat[start:stop].to(torch.float32)
            sides = codes[start // 2 : (stop + 1) // 2], absmax[start // self.block : -(-stop // self.block)]
            (form or encode_chunk)(part, *sides, self.block)
        if n and not read(absmax.isfinite().all(), expect=1.0):
            raise SkimpError(
                f"codec 'nf4' on a tensor of {tuple(x.shape)}",
                "NaN or infinity in it",
                "its whole block would decode to NaN",
                "the weights before they went wrong",
            )
        if not self.double_quant:
            return {"codes": codes, "absmax": absmax}
        # A running sum in float64: a mean of float32 in parallel depends in its last digit on the number of threads.
        offset = (absmax.double().cumsum(0)[-1] / blocks).float() if n else absmax.new_zeros(())
        nested = Dynamic8(signed=True).encode(absmax - offset)
        return {"codes": codes, "absmax": nested["codes"], "nested_absmax": nested["absmax"], "offset": offset.view(1)}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        n = count(shape)
        return self._range(parts, shape, 0, n, dtype).view(tuple(shape))

    def rows(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int, dtype: torch.dtype
    ) -> Tensor:
        """Rows start:stop of a matrix of `shape`, (stop - start, columns): what `decode` gives there, to the bit."""
        columns = shape[1]
        return self._range(parts, shape, start * columns, stop * columns, dtype).view(stop - start, columns)

    def few(self, parts: Mapping[str, Tensor], shape: Sequence[int], x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x W' + bias straight from the codes, for at most 8 rows of float32; None where that form does not apply."""
        whole = shape[1] % self.block == 0 and x.dtype == torch.float32 and 0 < x.shape[0] <= FEW_ROWS
        if not whole or native_form("nf4_few", x.device) is None:
            return None
        split = x.view(x.shape[0], -1, 2).transpose(1, 2).contiguous()
        return few_rows(split, parts["codes"], self._sides(parts), self.block, bias, shape[0])

    def _sides(self, parts: Mapping[str, Tensor]) -> list[Tensor]:
        if self.double_quant:
            return [parts["absmax"], parts["nested_absmax"], parts["offset"]]
        return [parts["absmax"]]

    def _range(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], first: int, last: int, dtype: torch.dtype
    ) -> Tensor:
        n = count(shape)
        if parts["codes"].numel() != (n + 1) // 2 or parts["absmax"].numel() != -(-n // self.block):
            raise SkimpError(
                f"codec 'nf4' decoding to {tuple(shape)}",
                f"{parts['codes'].numel()} bytes of codes and {parts['absmax'].numel()} block maxima",
                f"{n} elements need {(n + 1) // 2} and {-(-n // self.block)}",
                "pass the shape that was encoded",
            )
        return decode_range(parts["codes"], self._sides(parts), self.block, first, last, dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        return sum(count(size) * dtype.itemsize for size, dtype in self.spec(shape).values())

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["nested_absmax" if self.double_quant else "absmax"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "block": self.block, "double_quant": self.double_quant}
