"""Integers of 8 or 4 bits for frozen matrices: one scale for every group of neighbours in a row.

Groups begin anew with each row, so a slice of rows is decoded by itself. Symmetric codes stand for scale · (code − 8)
(128 with 8 bits) and leave out the lowest, so that 0 is exact and the range the same on both sides; with a zero point
they are those of `affine`, whose range of a group is widened to hold 0. Bits a weight: b + 32 / group, or b + 64 /
group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.errors import SkimpError
from skimp.core.read import read


@dataclass(frozen=True)
class Integers:
    """Parts of a (rows, columns) matrix: "codes" uint8 (rows, groups · group · bits / 8), "scale" float32 (rows,
    groups), and "zero" alike unless symmetric. Error ≤ half a scale.

    Args:
        group: neighbours in a row that share a scale, an even number.
        symmetric: no zero points.
    """

    bits: ClassVar[int] = 8
    name: ClassVar[str] = "int8"
    group: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.group < 2 or self.group % 2:
            raise SkimpError(f"codec '{self.name}' with an even group", f"{self.group}", "", "group 64")

    @property
    def block(self) -> int:
        """Elements that share side information."""
        return self.group

    def spec(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part for a matrix of `shape`."""
        rows, groups = self._sizes(shape)
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((rows, groups * self.group * self.bits // 8), torch.uint8),
            "scale": ((rows, groups), torch.float32),
        }
        return parts if self.symmetric else parts | {"zero": ((rows, groups), torch.float32)}

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and groups of a row; leading dimensions are rows."""
        columns = shape[-1] if shape else 1
        return count(shape) // max(1, columns), -(-columns // self.group)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The nearest code of every element.

        Raises:
            SkimpError: an integer tensor, or a NaN or an infinity in it.
        """
        check_floating(self.name, x)
        rows, groups = self._sizes(x.shape)
        spec = self.spec(x.shape)
        parts = {key: torch.empty(size, dtype=dtype, device=x.device) for key, (size, dtype) in spec.items()}
        matrix = x.detach().reshape(rows, x.shape[-1] if x.dim() else 1)
        step = max(1, 2**20 // max(1, groups * self.group))
        for start in range(0, rows, step):
            self._encode(matrix[start : start + step], {k: v[start : start + step] for k, v in parts.items()})
        if rows and not read(self.finite(parts), expect=1.0):
            raise SkimpError(
                f"codec '{self.name}' on a tensor of {tuple(x.shape)}",
                "NaN or infinity in it",
                "its whole group would decode to NaN",
                "the weights before they went wrong",
            )
        return parts

    def _encode(self, x: Tensor, parts: Mapping[str, Tensor]) -> None:
        rows, groups = parts["scale"].shape
        wide = torch.zeros(rows, groups * self.group, dtype=torch.float32, device=x.device)
        wide[:, : x.shape[1]].copy_(x)
        values, most = wide.view(rows, groups, self.group), 2**self.bits - 1
        if self.symmetric:
            half = 2 ** (self.bits - 1)
            scale = values.abs().amax(2).div_(half - 1)
            steps = torch.where(scale == 0, torch.ones_like(scale), scale)
            codes = (values / steps.unsqueeze(2)).round_().clamp_(1 - half, half - 1).add_(half)
        else:
            low, high = values.amin(2).clamp_max_(0.0), values.amax(2).clamp_min_(0.0)
            scale = (high - low).div_(most)
            steps = torch.where(scale == 0, torch.ones_like(scale), scale)
            zero = (-low / steps).round_()
            codes = (values / steps.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, most)
            parts["zero"].copy_(zero)
        parts["scale"].copy_(scale)
        parts["codes"].copy_(packed(codes.view(rows, -1), self.bits))

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if tuple(parts["codes"].shape) != self.spec(shape)["codes"][0]:
            raise SkimpError(
                f"codec '{self.name}' decoding to {tuple(shape)}", f"codes of {tuple(parts['codes'].shape)}"
            )
        rows, columns = self._sizes(shape)[0], shape[-1] if shape else 1
        return self.rows(parts, (rows, columns), 0, rows, dtype).view(tuple(shape))

    def rows(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int, dtype: torch.dtype
    ) -> Tensor:
        """Rows start:stop of a matrix of `shape`, (stop - start, columns)."""
        codes, scale = parts["codes"][start:stop], parts["scale"][start:stop].unsqueeze(2)
        if self.bits == 4:
            codes = torch.stack((codes >> 4, codes & 15), 2)
        values = codes.view(stop - start, -1, self.group).to(torch.float32)
        if self.symmetric:
            values.sub_(2.0 ** (self.bits - 1))
        else:
            values.sub_(parts["zero"][start:stop].unsqueeze(2))
        return values.mul_(scale).view(stop - start, -1)[:, : shape[1]].to(dtype).contiguous()

    def nbytes(self, shape: Sequence[int]) -> int:
        return sum(count(size) * dtype.itemsize for size, dtype in self.spec(shape).values())

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["scale"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "group": self.group, "symmetric": self.symmetric}


@dataclass(frozen=True)
class Int8(Integers):
    """8 bits: 8.25 bits a weight in groups of 128."""


@dataclass(frozen=True)
class Int4(Integers):
    """4 bits, two in a byte, the first in the upper half: 4.5 bits a weight in groups of 64."""

    bits: ClassVar[int] = 4
    name: ClassVar[str] = "int4"
    group: int = 64


def packed(codes: Tensor, bits: int) -> Tensor:
    """(rows, n) whole numbers from 0 as bytes, two of 4 bits in one; a NaN is 0. `codes` is overwritten."""
    flat = codes.nan_to_num_(0.0).to(torch.uint8)
    return flat if bits == 8 else flat[:, 0::2].bitwise_left_shift(4) | flat[:, 1::2]
