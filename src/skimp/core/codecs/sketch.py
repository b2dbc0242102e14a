"""A learned codebook for each row: 16 (or 4) values that its weights are closest to, and a code for every weight.

"Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", Zhang et al., 2025, arXiv 2410.06364, section 3:
a row in g groups of neighbours, each with a grid of K = 2^b values of its own; weight (i, j) is grid[i, group of j,
code]. Here the grids are one-dimensional k-means of the weights, of each weight's importance where that is given (the
paper: a power of the loss's curvature in its column). Bits a weight: b + 16 g K / columns, grids in float16.
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

#: Rounds of k-means; from where it begins, few are needed.
ROUNDS = 10
#: Numbers of a matrix that are clustered at once.
NUMBERS = 2**20


@dataclass(frozen=True)
class Sketch:
    """Parts of a (rows, columns) matrix: "codes" uint8 (rows, groups · ⌈group · b / 8⌉), the first in the highest bits;
    "grid" float16 (rows, groups, 2^b), sorted.

    A group with at most 2^b different values is exact up to float16.

    Args:
        bits: 4 or 2.
        groups: grids in a row; columns are cut evenly, the last group may be short.
    """

    bits: int = 4
    groups: int = 1
    name: ClassVar[str] = "sketch"

    def __post_init__(self) -> None:
        if self.bits not in (2, 4) or self.groups < 1:
            found = f"bits {self.bits}, groups {self.groups}"
            raise SkimpError("codec 'sketch' with 2 or 4 bits and a group or more", found, "", "bits 4, groups 1")

    @property
    def block(self) -> int:
        """A row shares its grid and is never cut, whatever its length: shards of whole rows hold whole blocks."""
        return 1

    def width(self, columns: int) -> int:
        """Columns of a group, a whole number of bytes of codes."""
        each = 8 // self.bits
        return max(each, -(-columns // self.groups // each) * each)

    def spec(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part for a matrix of `shape`."""
        rows, columns = self._sizes(shape)
        return {
            "codes": ((rows, self.groups * self.width(columns) * self.bits // 8), torch.uint8),
            "grid": ((rows, self.groups, 2**self.bits), torch.float16),
        }

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        columns = shape[-1] if shape else 1
        return count(shape) // max(1, columns), columns

    def encode(self, x: Tensor, importance: Tensor | None = None) -> dict[str, Tensor]:
        """Grids by k-means, codes by the nearest value of the grid as it is stored.

        Args:
            importance: (columns,) not negative; how much a weight's error counts. None: all alike.

        Raises:
            SkimpError: an integer tensor, a NaN or an infinity in it, or a value float16 cannot hold.
        """
        check_floating(self.name, x)
        rows, columns = self._sizes(x.shape)
        width = self.width(columns)
        parts = {k: torch.empty(size, dtype=kind, device=x.device) for k, (size, kind) in self.spec(x.shape).items()}
        matrix = x.detach().reshape(rows, columns)
        mass = torch.zeros(self.groups * width, dtype=torch.float32, device=x.device)
        mass[:columns] = 1.0 if importance is None else importance.to(torch.float32)
        step = max(1, NUMBERS // (self.groups * width))
        for start in range(0, rows, step):
            part = torch.zeros(min(step, rows - start), self.groups * width, dtype=torch.float32, device=x.device)
            part[:, :columns].copy_(matrix[start : start + step])
            values = part.view(-1, width)
            weights = mass.view(self.groups, width).repeat(part.shape[0], 1)
            grid = cluster(values, weights, 2**self.bits).to(torch.float16)
            parts["grid"][start : start + step] = grid.view(-1, self.groups, 2**self.bits)
            codes = nearest(values, grid.float())
            parts["codes"][start : start + step] = self.packed(codes.view(part.shape[0], -1))
        if rows and not (read(self.finite(parts), expect=1.0) and read(matrix.isfinite().all(), expect=1.0)):
            raise SkimpError(
                f"codec 'sketch' on a tensor of {tuple(x.shape)}",
                "NaN, infinity, or a value beyond float16 in it",
                "its row's grid would hold it",
                "the weights before they went wrong",
            )
        return parts

    def packed(self, codes: Tensor) -> Tensor:
        """Codes of whole rows (rows, groups · width), each below 2^b, as they are stored, the first in the highest
        bits."""
        split = codes.to(torch.uint8).view(codes.shape[0], -1, 8 // self.bits)
        packed = split[..., 0]
        for k in range(1, 8 // self.bits):
            packed = packed.bitwise_left_shift(self.bits).bitwise_or_(split[..., k])
        return packed

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if tuple(parts["codes"].shape) != self.spec(shape)["codes"][0]:
            raise SkimpError(f"codec 'sketch' decoding to {tuple(shape)}", f"codes of {tuple(parts['codes'].shape)}")
        rows, columns = self._sizes(shape)
        return self.rows(parts, (rows, columns), 0, rows, dtype).view(tuple(shape))

    def rows(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int, dtype: torch.dtype
    ) -> Tensor:
        """Rows start:stop of a matrix of `shape`, (stop - start, columns)."""
        grid = parts["grid"][start:stop].reshape(-1, 2**self.bits)
        grid = grid.to(torch.promote_types(grid.dtype, torch.float32))
        values = grid.gather(1, self._split(parts["codes"][start:stop]).view(grid.shape[0], -1))
        return values.view(stop - start, -1)[:, : shape[1]].to(dtype).contiguous()

    def sums(self, parts: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int, values: Tensor) -> Tensor:
        """The transpose of `rows` as a map of grids: of numbers at weights the sum over all that have one code.

        A gradient of rows start:stop becomes that of their grids. In one order of additions whatever the number of
        threads: each row is summed by itself.

        Args:
            values: (stop - start, columns).

        Returns:
            (stop - start, groups, 2^b), in float32 or what is wider of `values`.
        """
        kind = torch.promote_types(values.dtype, torch.float32)
        codes = self._split(parts["codes"][start:stop]).view((stop - start) * self.groups, -1)
        padded = self.groups * self.width(shape[1]) - shape[1]
        wide = torch.nn.functional.pad(values.to(kind), (0, padded)).view(codes.shape)
        made = values.new_zeros(codes.shape[0], 2**self.bits, dtype=kind)
        if values.device.type == "cpu":
            made.scatter_add_(1, codes, wide)
        else:  # elsewhere a scatter adds in any order, and a resume would not be the same run
            for k in range(2**self.bits):
                made[:, k] = wide.masked_fill(codes != k, 0.0).sum(1)
        return made.view(stop - start, self.groups, -1)

    def _split(self, codes: Tensor) -> Tensor:
        """(rows, codes of a row) int64 of packed ones, those of the columns beyond the last among them."""
        each = 8 // self.bits
        split = torch.empty(*codes.shape, each, dtype=torch.int64, device=codes.device)
        for k in range(each):  # into its place and type at once: several times as fast as through a stack
            split[..., k] = codes.bitwise_right_shift(self.bits * (each - 1 - k)).bitwise_and_(2**self.bits - 1)
        return split.view(codes.shape[0], -1)

    def nbytes(self, shape: Sequence[int]) -> int:
        return sum(count(size) * dtype.itemsize for size, dtype in self.spec(shape).values())

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["grid"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "bits": self.bits, "groups": self.groups}


def cluster(values: Tensor, weights: Tensor, most: int) -> Tensor:
    """One-dimensional k-means of every row: (rows, most) sorted centres.

    Rows of at most `most` different values (of those that weigh) get just these. A centre without members stays.

    Args:
        values: (rows, n) float32. weights: alike, not negative.
    """
    order = values.masked_fill(weights == 0, float("inf")).sort(1).values
    there = (weights > 0).sum(1, keepdim=True).clamp(min=1)
    last = order.gather(1, there - 1)
    last = torch.where(last.isinf(), torch.zeros_like(last), last)  # a group beyond the columns
    order = torch.where(order.isinf(), last, order)  # what does not weigh repeats the largest
    first = torch.ones_like(order, dtype=torch.bool)
    first[:, 1:] = order[:, 1:] != order[:, :-1]
    rank = first.cumsum(1) - 1
    distinct = last.repeat(1, most).scatter(1, rank.clamp(max=most - 1), order)
    few = rank[:, -1:] < most
    grid = _beginning(order, most)
    for _ in range(ROUNDS):
        codes = nearest(values, grid)
        mass = torch.zeros_like(grid).scatter_add_(1, codes, weights)
        total = torch.zeros_like(grid).scatter_add_(1, codes, weights * values)
        grid = torch.where(mass > 0, total / mass.clamp(min=1e-30), grid).sort(1).values
    return torch.where(few, distinct, grid)


def _beginning(order: Tensor, most: int) -> Tensor:
    """Where fine grids have their levels: as dense as the cube root of the values' own density (Panter and Dite, 1951).

    Between neighbours d apart the density is about 1 / (n d), so that an interval's share is d^(2/3)."""
    share = (order[:, 1:] - order[:, :-1]).pow_(2 / 3).cumsum(1)
    share = torch.cat((torch.zeros_like(order[:, :1]), share), 1)
    steps = (torch.arange(most, dtype=torch.float32, device=order.device) + 0.5) / most
    wanted = share[:, -1:] * steps
    return order.gather(1, torch.searchsorted(share, wanted).clamp_(max=order.shape[1] - 1))


def nearest(values: Tensor, grid: Tensor) -> Tensor:
    """Index of the nearest centre, the lower one where two are as near; `grid` (rows, K) sorted."""
    return torch.searchsorted(((grid[:, 1:] + grid[:, :-1]) / 2).contiguous(), values.contiguous())
