"""The operator `skimp::spam_sparse`: SPAM on one number of each of K equal runs of a tensor.

Run j of K covers the places ⌊j·n/K⌋ to ⌊(j+1)·n/K⌋; the place in it comes from number j of the noise of this period.
Every number is met with the same chance in every period, but two of one run never together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.noise import fill_words_, key64
from skimp.core.sharded import Part
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK
from skimp.optim.elementwise import wide_dtype
from skimp.optim.spam_chunk import spam_chunk


class Places:
    """Scratch for the places of a chunk of runs: 28 bytes each, and the words they come from."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.low, self.high = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
        self.words = torch.empty((size + 3) // 4, 4, dtype=torch.int64, device=device)
        self.scratch = torch.empty(2, (size + 3) // 4, dtype=torch.int64, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        return 16 * size + 48 * ((size + 3) // 4)

    def draw(self, key: int, period: int, start: int, n: int, runs: int, total: int) -> Tensor:
        """Places of the runs start … start + n (start a multiple of 4), (n,) int64."""
        low, high = self.low[:n], self.high[:n]
        torch.arange(start, start + n, out=low)
        torch.add(low, 1, out=high)
        low.mul_(total).floor_divide_(runs)
        high.mul_(total).floor_divide_(runs).sub_(low)
        blocks = (n + 3) // 4
        fill_words_(self.words[:blocks], self.scratch[:, :blocks], key, period, start // 4)
        words = self.words.view(-1)[:n]
        return low.add_(words.mul_(high).bitwise_right_shift_(32))


def spam_sparse(
    part: Part,
    p: Tensor,
    g: Tensor,
    states: Sequence[Tensor],
    scalars: Sequence[float],
    step: int,
    period: int,
    seed: int,
) -> None:
    """One step in place on the kept numbers of the part that `p` is; `states` are (K,)."""
    places, key = key64(seed, f"{part.address}@{part.offset} kept"), key64(seed, f"{part.address}@{part.offset}")
    _spam_sparse(p, g, list(states), list(scalars), places, key, step, period)


@torch.library.custom_op(
    "skimp::spam_sparse",
    mutates_args=("p", "states"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!)[] states, float[] scalars, int places, int key, int step, int period)"
    " -> ()",
)
def _spam_sparse(
    p: Tensor,
    g: Tensor,
    states: list[Tensor],
    scalars: list[float],
    places: int,
    key: int,
    step: int,
    period: int,
) -> None:
    total, runs, wide, device = p.numel(), states[0].numel(), wide_dtype(p.dtype), p.device
    size = min(CHUNK, runs)
    where = Places(size, device)
    grad, weight, u, w = (torch.empty(size, dtype=wide, device=device) for _ in range(4))
    own_p, own_g = (torch.empty(size, dtype=t.dtype, device=device) for t in (p, g))
    bad = torch.empty(size, dtype=torch.bool, device=device)
    noise = Noise(size, key, device) if p.dtype == torch.bfloat16 else None
    flat, flat_g = p.view(-1), g.view(-1)
    for start in range(0, runs, CHUNK):
        n = min(CHUNK, runs - start)
        index = where.draw(places, period, start, n, runs, total)
        torch.index_select(flat, 0, index, out=own_p[:n])
        torch.index_select(flat_g, 0, index, out=own_g[:n])
        weight[:n].copy_(own_p[:n])
        grad[:n].copy_(own_g[:n])
        torch.mul(grad[:n], grad[:n], out=u[:n])
        u[:n].sub_(u[:n])
        torch.ne(u[:n], 0.0, out=bad[:n])
        grad[:n].masked_fill_(bad[:n], 0.0)
        held = [state[start : start + n] for state in states]
        spam_chunk(weight[:n], grad[:n], held, [u[:n], w[:n]], scalars)
        torch.where(bad[:n], weight[:n], grad[:n], out=weight[:n])
        for state in held:
            state.masked_fill_(bad[:n], 0.0)
        if noise is not None:
            noise.draw(step, start)
            round_bits_(weight[:n], noise.high(n))
        own_p[:n].copy_(weight[:n])
        flat.index_copy_(0, index, own_p[:n])


@_spam_sparse.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::spam_sparse")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p, g, states = args[:3]
    size, wide = min(CHUNK, states[0].numel()), wide_dtype(p.dtype).itemsize
    noise = Noise.nbytes(size) if p.dtype == torch.bfloat16 else 0
    buffers = size * (4 * wide + p.dtype.itemsize + g.dtype.itemsize + 1)
    return int(buffers + Places.nbytes(size) + noise + CAST_SCALAR_BYTES)
