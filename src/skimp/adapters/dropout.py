"""Dropout on an addition's input, addressed instead of drawn.

Rule: number k of row i of a module's input, in optimizer step t, is kept when u >= p, where u is number
(row_in_step * K + k) of stream t under (seed, "<module>.dropout"); K counts the numbers of one row (tokens x inputs).
Kept numbers are divided by 1 - p. The mask is made again in backward and never stored.

So one recipe has one set of masks: cut into micro-batches or not, recomputed or not, resumed or not; and two modules
never share one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skimp.core import noise
from skimp.core.errors import SkimpError
from skimp.core.position import position
from skimp.core.repeat import rounds

#: Numbers of a mask that exist at once: 4 MiB in float32, beside 4 MiB of masked inputs.
PIECE = 2**20


@dataclass(frozen=True)
class Dropout:
    """The masks of one module in one forward.

    Attributes:
        p: probability of a 0. seed, name: address. step: stream. offset: number of the first element.
    """

    p: float
    seed: int
    name: str
    step: int
    offset: int

    def pieces(self, tokens: int, width: int) -> Iterator[tuple[int, int]]:
        """Token ranges (start, stop) whose masks are made at once."""
        size = max(1, PIECE // width)
        for start in rounds(range(0, tokens, size)):
            yield start, min(start + size, tokens)

    def mask(self, start: int, stop: int, like: Tensor) -> Tensor:
        """(stop - start, width) factors of tokens start:stop in `like`'s dtype: 0, or 1 / (1 - p)."""
        width = like.shape[-1]
        count = (stop - start) * width
        u = noise.uniform(
            self.seed, self.name, self.offset + start * width, count, stream=self.step, device=like.device
        )
        torch.ge(u, self.p, out=u)
        return u.mul_(1.0 / (1.0 - self.p)).view(stop - start, width).to(like.dtype)


def dropout_here(p: float, seed: int, module: str, x: Tensor) -> Dropout:
    """The masks for input `x` (rows, …, width) at the declared position.

    Raises:
        SkimpError: no position is declared, so that every forward would get the same mask.
    """
    here = position()
    if here is None:
        raise SkimpError(
            f"dropout {p:g} on the input of {module}",
            "a training forward whose place in the run was not declared",
            "masks are addressed by step and row; without them every step would drop the same numbers",
            [
                "with skimp.core.position.declared_position(step, first_row): loss = model(...)",
                "dropout=0.0",
            ],
        )
    if here.tokens is not None:
        first = (here.row * here.tokens + here.token) * x.shape[-1]
    else:
        first = here.row * (x.numel() // max(1, x.shape[0]))
    return Dropout(p, seed, f"{module}.dropout", here.step, first)
