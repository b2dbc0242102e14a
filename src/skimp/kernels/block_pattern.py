"""Which key blocks a query block of each head sees: a local window, and every v-th block before it, heads taking turns.

    allowed(g, i, j) = j <= i and (i - j < local or (j + g step + offset) mod stride == 0)

step = max(1, stride // heads), for key head g, query block i and key block j, counted from the start of the sequence;
inside the diagonal block the ordinary causal mask. Every query head of a group has its key head's pattern, so that what
a key head no longer needs is needed by nobody. Blocks are counted from the start and not from the query, so a block
that leaves the window and is not on the head's stride is never needed again: a cache can let it go.

Coverage: a block outside all windows is seen by some head only where its residue mod stride is some head's. With fewer
key heads than `stride` some residues are nobody's, and their context reaches no later token in one layer.

Memory of a cache, per key head and token: (local block + (seq - local block) / stride) / seq. Time: the same ratio of
blocks. Worked: 32,768 tokens, blocks of 64, local 16, stride 8: 1,024 + 3,968 = 4,992 tokens, 6.6 times fewer.

Source: "S2-Attention: Hardware-Aware Context Sharding among Attention Heads", 2024, arXiv 2407.17678, section 3. There
the step is taken from the number of query heads, which leaves residues bare under grouped keys; here from key heads.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError


@dataclass(frozen=True)
class BlockPattern:
    """One layer's pattern.

    Attributes:
        heads: key heads.
        block: tokens of a block, a multiple of 16.
        local: blocks of the window, the query's own counted.
        stride: every how many blocks before the window; None for the window alone.
        offset: added to the residues; 1 in the weights published as Phi-3-small.
        dense_heads: the last so many key heads see everything before them.
    """

    heads: int
    block: int = 64
    local: int = 16
    stride: int | None = 8
    offset: int = 0
    dense_heads: int = 0

    def __post_init__(self) -> None:
        if self.heads < 1 or self.block < 16 or self.block % 16 or self.block > 128:
            raise SkimpError(
                "a pattern over key heads in blocks of 16, 32, … 128 tokens",
                f"{self.heads} heads, blocks of {self.block}",
                instead="block: 64",
            )
        if self.local < 1 or (self.stride is not None and self.stride < 1):
            raise SkimpError(
                "a window of 1 block or more and a stride of 1 or more",
                f"local {self.local}, stride {self.stride}",
                "a query would see nothing, not even itself",
                "local: 8, stride: 8",
            )
        if not 0 <= self.dense_heads <= self.heads:
            raise SkimpError(f"at most {self.heads} dense key heads", f"{self.dense_heads}")

    @property
    def step(self) -> int:
        """Blocks by which one head's residue is behind the head's before."""
        return max(1, (self.stride or 1) // self.heads)

    def allowed(self, head: int, i: int, j: int) -> bool:
        """Whether query block i of key head `head` sees key block j."""
        if j > i:
            return False
        if i - j < self.local or head >= self.heads - self.dense_heads:
            return True
        return self.stride is not None and (j + head * self.step + self.offset) % self.stride == 0

    def row(self, head: int, i: int) -> list[int]:
        """The key blocks of query block i, in rising order; without a test of each."""
        start = max(0, i + 1 - self.local)
        if head >= self.heads - self.dense_heads:
            return list(range(i + 1))
        if self.stride is None:
            return list(range(start, i + 1))
        first = -(head * self.step + self.offset) % self.stride
        return [*range(first, start, self.stride), *range(start, i + 1)]

    def uncovered(self) -> tuple[int, ...]:
        """Residues of blocks, mod stride, that no head sees beyond its window; empty when the union covers all."""
        if self.dense_heads or self.stride is None:
            return () if self.dense_heads else (0,)
        seen = {-(g * self.step + self.offset) % self.stride for g in range(self.heads)}
        return tuple(r for r in range(self.stride) if r not in seen)

    def check_coverage(self) -> None:
        """Raise where some context reaches no later token.

        Raises:
            SkimpError: with the residues, and a stride that covers.
        """
        bare = self.uncovered()
        if bare:
            raise SkimpError(
                f"{self.heads} key heads whose blocks together are the whole context",
                f"stride {self.stride}: blocks of residue {', '.join(map(str, bare))} are seen by no head",
                "each key head strides over one residue, so there must be at least as many as the stride",
                [f"stride: {self.heads}", "coverage: partial, beside dense layers or dense heads"],
            )

    def visited(self, blocks: int) -> int:
        """Key blocks visited by all query blocks of all key heads: what time is proportional to."""
        return sum(len(self.row(g, i)) for g in range(self.heads) for i in range(blocks))

    def listed(self, blocks: int) -> tuple[Any, Any]:
        """(starts, columns): int32 arrays of ctypes, key heads × (blocks + 1) and the blocks visited, row by row.

        No tensors: a simulated run has the same pattern as a real one, and it is memory of no category.
        """
        return _listed(self, blocks)

    def mask(self, seq: int) -> Tensor:
        """(heads, seq, seq) bool: the plain form, for tests; a token sees a token."""
        blocks = -(-seq // self.block)
        coarse = torch.zeros(self.heads, blocks, blocks, dtype=torch.bool)
        for g in range(self.heads):
            for i in range(blocks):
                coarse[g, i, self.row(g, i)] = True
        fine = coarse.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)[:, :seq, :seq]
        return fine & torch.ones(seq, seq, dtype=torch.bool).tril()


@lru_cache(maxsize=64)
def _listed(pattern: BlockPattern, blocks: int) -> tuple[Any, Any]:
    starts: list[int] = []
    columns: list[int] = []
    for g in range(pattern.heads):
        for i in range(blocks):
            starts.append(len(columns))
            columns += pattern.row(g, i)
        starts.append(len(columns))
    return (ctypes.c_int32 * len(starts))(*starts), (ctypes.c_int32 * len(columns))(*columns)
