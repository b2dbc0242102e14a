"""A cache that keeps of each key head what its pattern still needs, and lets the rest go block by block.

Per key head and layer (local block + (seq - local block) / stride) tokens in the place of seq: at 32,768 tokens, blocks
of 64, local 16, stride 8 it is 4,992, 6.6 times fewer. Heads hold equally many blocks give or take one, so one buffer
over all heads wastes at most a block a head.

Source: "S2-Attention", 2024, arXiv 2407.17678, section 3.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from skimp.core.attention import POSITIONS
from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.sparse_apply import SparseAttention
from skimp.run.kv_cache import GrowingLayer


class SparseLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's kept keys and values, (rows, key heads, most held, dim), heads filled to their own length.

    Attributes:
        seen: positions that have passed. places: each head's positions held, in order.
    """

    def __init__(self, pattern: BlockPattern) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pattern, self.seen = pattern, 0
        self.places: list[list[int]] = [[] for _ in range(pattern.heads)]
        self._buffers: list[Tensor] = []
        self._block = 0  # the last one that the heads were cleared for

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Let go what the next position no longer needs, then put the new positions behind the rest."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._let_go()
        new = list(range(self.seen, self.seen + key_states.shape[2]))
        self._make_room(key_states, value_states, max(map(len, self.places)) + len(new))
        for head, held in enumerate(self.places):
            for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
                buffer[:, head, len(held) : len(held) + len(new)].copy_(states[:, head])
            held += new
        self.seen += len(new)
        longest = max(map(len, self.places))
        self.keys, self.values = (buffer[:, :, :longest] for buffer in self._buffers)
        places = torch.tensor([held + [-1] * (longest - len(held)) for held in self.places], device=key_states.device)
        setattr(self.keys, POSITIONS, places)
        return self.keys, self.values

    def _let_go(self) -> None:
        """Blocks once off stay off (`block_pattern`), so what the first new position does not see, none will."""
        block = self.seen // self.pattern.block
        if block == self._block:
            return
        self._block = block
        for head, held in enumerate(self.places):
            needed = set(self.pattern.row(head, block))
            kept = [n for n, place in enumerate(held) if place // self.pattern.block in needed]
            if len(kept) == len(held):
                continue
            index = torch.tensor(kept, dtype=torch.int64, device=self._buffers[0].device)
            for buffer in self._buffers:
                buffer[:, head, : len(kept)] = buffer[:, head].index_select(1, index)
            self.places[head] = [held[n] for n in kept]

    def _make_room(self, key: Tensor, value: Tensor, positions: int) -> None:
        if self._buffers and positions <= self._buffers[0].shape[2]:
            return
        old, room = self._buffers, positions + positions // 2
        # Zeros: what no head has filled is masked, and 0 times anything but NaN is nothing.
        self._buffers = [t.new_zeros(t.shape[0], t.shape[1], room, t.shape[3]) for t in (key, value)]
        for buffer, before in zip(self._buffers, old, strict=False):
            buffer[:, :, : before.shape[2]].copy_(before)

    def get_seq_length(self) -> int:
        """Positions that have passed, held or not."""
        return self.seen

    def reset(self) -> None:
        """Forget everything, buffers too."""
        super().reset()
        self._buffers, self.seen, self._block = [], 0, 0
        self.places = [[] for _ in range(self.pattern.heads)]

    def keep(self, positions: int) -> int:
        """Forget all but the first `positions`: none are kept unless all are, for blocks that went do not come back."""
        if positions != self.seen:
            self.reset()
        return self.seen

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but these; what a head holds is the same for all of them."""
        self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]


class SparseCache(Cache):
    """A `transformers` cache for a model with `SparseAttention`: dense blocks hold everything, the others a share."""

    def __init__(self, sparse: SparseAttention, layers: int, room: int = 0) -> None:
        self._layers: list[Any] = [
            SparseLayer(sparse.pattern) if i < sparse.blocks and i not in sparse.dense else GrowingLayer(room)
            for i in range(layers)
        ]
        super().__init__(layers=list(self._layers))

    @property
    def held(self) -> int:
        """Positions that have passed."""
        return int(self._layers[0].get_seq_length())

    def keep(self, positions: int) -> int:
        """Go back to the first `positions`, or to the beginning; returns where the text now ends."""
        kept = positions if positions == self.held else 0
        for layer in self._layers:
            layer.keep(kept)
        return kept

    def keep_rows(self, rows: Tensor) -> None:
        """Of several texts keep these alone."""
        for layer in self._layers:
            layer.keep_rows(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the positions held, without the room behind them."""
        total = 0
        for layer in self._layers:
            if isinstance(layer, SparseLayer):
                per = sum(b.shape[0] * b.shape[3] * b.element_size() for b in layer._buffers)
                total += per * sum(map(len, layer.places))
            elif layer.is_initialized:
                total += sum(t.numel() * t.element_size() for t in (layer.keys, layer.values))
        return total
