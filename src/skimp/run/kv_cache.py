"""Keys and values of the past, kept in buffers that grow by half instead of being copied at every token.

A buffer of n positions costs 2 · layers · kv_heads · head_dim · itemsize · n bytes: for the 135M model in float32
2 · 30 · 3 · 64 · 4 = 46 kB a token, 94 MB for 2,048 of them. Joining tensors at each token, as a plain cache does,
would copy all of that for each new one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values, (rows, kv_heads, positions, head_dim): views of buffers with room behind them.

    Args:
        room: positions to make room for at once.
    """

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Put new positions behind those there are; returns all of them."""
        past = self.get_seq_length()
        held = past + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._buffers or held > self._buffers[0].shape[2]:
            self._grow((key_states, value_states), past, max(held, self.room, past + past // 2))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, past:held].copy_(new)
        self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)
        return self.keys, self.values

    def _grow(self, like: tuple[Tensor, Tensor], past: int, positions: int) -> None:
        old: list[Any] = [self.keys, self.values] if past else []
        self._buffers = [t.new_empty(t.shape[0], t.shape[1], positions, t.shape[3]) for t in like]
        for buffer, kept in zip(self._buffers, old, strict=False):
            buffer[:, :, :past].copy_(kept)

    def reset(self) -> None:
        """Forget everything, buffers too."""
        super().reset()
        self._buffers = []

    def keep(self, positions: int) -> None:
        """Forget all but the first `positions`; their buffers stay."""
        if self.is_initialized and positions < self.get_seq_length():
            self.keys, self.values = (buffer[:, :, :positions] for buffer in self._buffers)

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but these; one buffer at a time is copied."""
        held = self.get_seq_length()
        for index, buffer in enumerate(self._buffers):
            self._buffers[index] = buffer.index_select(0, rows)
        if self._buffers:
            self.keys, self.values = (buffer[:, :, :held] for buffer in self._buffers)


class GrowingCache(Cache):
    """A `transformers` cache of `GrowingLayer`s; windows are cut by the attention call, not here."""

    def __init__(self, blocks: int, room: int = 0) -> None:
        self._growing = [GrowingLayer(room) for _ in range(blocks)]
        super().__init__(layers=list(self._growing))

    @property
    def held(self) -> int:
        """Positions in it."""
        return int(self._growing[0].get_seq_length())

    def keep(self, positions: int) -> int:
        """Forget what comes after the first `positions`: another text goes on from there. Returns where it now ends."""
        for layer in self._growing:
            layer.keep(positions)
        return min(positions, self.held)

    def keep_rows(self, rows: Tensor) -> None:
        """Of several texts keep these alone."""
        for layer in self._growing:
            layer.keep_rows(rows)
