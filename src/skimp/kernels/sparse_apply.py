"""Put block-sparse attention into a model: its attention modules attend over a pattern; reversible.

The pattern is part of the model's mathematics: a model trained with it must be used with it, and a dense one that is
converted is another model until it has been trained on. What the pattern cannot honour is refused where it would be
asked for: a window or a cap of the model's own, attention to both sides, a mask tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from skimp.core.attention import OWN, POSITIONS, Documents
from skimp.core.errors import ConflictError, EffectError
from skimp.core.structure import Structure
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.native.sparse import MOST_DIM, SPARSE
from skimp.kernels.sparse_attention import sparse_attention


class SparseAttention:
    """Attention modules of `model`, but those of `dense` blocks, attend over `pattern`.

    Attributes:
        modules: how many were changed, of so many `blocks`.
        runs: calls over a whole sequence that went through the pattern; `steps`: calls over a past.

    Raises:
        ConflictError: kernels not built, no attention module found, or a head wider than the kernel takes.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, pattern: BlockPattern, dense: Collection[int] = ()
    ) -> None:
        if not SPARSE.available():
            raise ConflictError(
                "attention over a block pattern",
                "the native kernel is not built",
                "its plain form holds every score, and would save nothing",
                "python -m skimp.kernels.native",
            )
        if structure.head_dim > MOST_DIM:
            raise ConflictError(f"heads of {MOST_DIM} numbers or fewer", f"{structure.head_dim}")
        projections = structure.roles.get("q") or structure.roles.get("qkv")
        if not projections:
            raise ConflictError(
                "attention over a block pattern", f"no query projection found in a model of type '{structure.family}'"
            )
        self.pattern, self.dense, self.runs, self.steps = pattern, frozenset(dense), 0, 0
        self.blocks = len(structure.blocks)
        inside = projections[0].rpartition(".")[0]
        self._changed: list[nn.Module] = []
        for index, block in enumerate(structure.blocks):
            if index not in self.dense:
                module = model.get_submodule(f"{block}.{inside}")
                setattr(module, OWN, self)
                self._changed.append(module)
        self.modules = len(self._changed)
        if not self.modules:
            raise ConflictError(
                "attention over a block pattern", "every block is dense", instead="dense_every of 2 or more"
            )

    def remove(self) -> None:
        """The modules attend to everything again."""
        for module in self._changed:
            delattr(module, OWN)
        self._changed.clear()

    def assert_effect(self, calls: int, forwards: int, seq: int) -> None:
        """Every changed module attended over a pattern that leaves blocks out.

        Args:
            calls: of the pattern, in so many forwards of the model (recomputed ones are not counted); seq: tokens of a
                row.

        Raises:
            EffectError: a module attended to everything.
        """
        blocks = -(-seq // self.pattern.block)
        everything = self.pattern.heads * blocks * (blocks + 1) // 2
        visited = self.pattern.visited(blocks)
        if calls < forwards * len(self._changed) or not self._changed or visited >= everything:
            raise EffectError(
                f"{self.modules} attention modules over {visited:,} of {everything:,} blocks",
                f"{calls} calls in {forwards} forwards",
                "no block was left out, so no time was saved",
                f"a window and stride below {blocks} blocks of {self.pattern.block} tokens",
            )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, scale: float | None,
        causal: bool, window: int | None, softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """As `core.attention.attend` calls it: (rows, heads, seq, dim) in and out.

        Raises:
            ConflictError: a window, a cap, or attention to both sides.
        """
        found = (
            f"a window of {window} tokens" if window is not None and window < key.shape[2] else
            f"a cap of {softcap:g} on the scores" if softcap is not None else
            "attention to both sides" if not causal and query.shape[2] > 1 else ""
        )  # fmt: skip
        if found:
            raise ConflictError(
                "attention over a block pattern",
                f"{found} in the model's own attention",
                "both say which keys a query sees or how it weighs them, and a dense model has been trained with its "
                "own",
                "leave attention out of the recipe, or keep those layers dense (dense_every)",
            )
        if hasattr(key, POSITIONS) or key.shape[2] != query.shape[2]:
            self.steps += 1
            return over_a_past(query, key, value, self.pattern, scale)
        self.runs += 1
        pieces = None if documents is None or all(len(d) == 2 for d in documents) else documents
        if pieces is None:
            return sparse_attention(query, key, value, self.pattern, scale)
        return torch.cat([self._row(r, query, key, value, cuts, scale) for r, cuts in enumerate(pieces)])

    def _row(
        self, row: int, query: Tensor, key: Tensor, value: Tensor, cuts: Sequence[int], scale: float | None
    ) -> Tensor:
        """Each document by itself, its blocks counted from its own start, as when it is alone."""
        parts = [
            sparse_attention(query[cut], key[cut], value[cut], self.pattern, scale)
            for cut in ((slice(row, row + 1), slice(None), slice(a, b)) for a, b in pairwise(cuts))
        ]
        return torch.cat(parts, 2)


def over_a_past(query: Tensor, key: Tensor, value: Tensor, pattern: BlockPattern, scale: float | None) -> Tensor:
    """The last queries of a text against what a cache holds: everything, or what the pattern still needs.

    Args:
        query: (rows, heads, n, dim), the last n positions. key, value: (rows, key heads, held, dim); what `POSITIONS`
            on the key says of their places, else they are all there, in order.

    Returns:
        (rows, heads, n, dim).
    """
    heads, count, device = pattern.heads, query.shape[2], query.device
    places: Tensor | None = getattr(key, POSITIONS, None)
    if places is None:
        places = torch.arange(key.shape[2], device=device).expand(heads, -1)
    last = places.amax()
    at = (last - count + 1 + torch.arange(count, device=device)).view(1, -1, 1)
    i, j = at // pattern.block, places.unsqueeze(1) // pattern.block
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    seen = (i - j < pattern.local) | (head >= heads - pattern.dense_heads)
    if pattern.stride is not None:
        seen |= (j + head * pattern.step + pattern.offset) % pattern.stride == 0
    seen &= (places.unsqueeze(1) <= at) & (places.unsqueeze(1) >= 0)
    rows, every, _, dim = query.shape
    grouped = query.reshape(rows, heads, every // heads, count, dim)
    scores = grouped @ key.unsqueeze(2).transpose(3, 4) * (dim**-0.5 if scale is None else scale)
    weights = torch.softmax(scores.float().masked_fill(~seen.unsqueeze(1), float("-inf")), -1).to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)
