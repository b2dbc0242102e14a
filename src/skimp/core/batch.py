"""The one batch type. Every loss, step and attention call reads these declared facts and never tensor values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """A micro-batch of token rows.

    Attributes:
        ids: (rows, seq) int64 token ids.
        labels: (rows, seq) int64; `labels[r, t]` is the token to be predicted *from* position t (already shifted),
            `IGNORE` where nothing is trained: padding, and the last token of each document.
        positions: (rows, seq) int64, restarting at 0 at each document.
        documents: for each row the offsets where documents begin, then the end: (0, 100, 512) is two documents.
            Host integers: attention splits on them without looking at a tensor. Padding is its own last "document".
        trained: the number of labels that are not `IGNORE`, a host integer, so that the normaliser of an optimizer
            step is known before any forward.
        weights: (rows, seq) float32 per-token loss weights, or None for all ones.
        source: (rows,) int64 id of the data source of each row, or None.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: tuple[tuple[int, ...], ...]
    trained: int
    weights: Tensor | None = None
    source: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.ids.shape[1]

    def tensors(self) -> list[Tensor]:
        """Everything of the batch that takes memory."""
        every = (self.ids, self.labels, self.positions, self.weights, self.source)
        return [t for t in every if t is not None]

    def split(self, micro_rows: int) -> list[Batch]:
        """Cut along rows into micro-batches of at most `micro_rows` rows; the last may be smaller."""
        if micro_rows >= self.rows:
            return [self]
        return [self.take(start, min(start + micro_rows, self.rows)) for start in range(0, self.rows, micro_rows)]

    def take(self, start: int, stop: int) -> Batch:
        """Rows start:stop as views."""
        labels = self.labels[start:stop]
        return Batch(
            self.ids[start:stop],
            labels,
            self.positions[start:stop],
            self.documents[start:stop],
            count_trained(labels),
            None if self.weights is None else self.weights[start:stop],
            None if self.source is None else self.source[start:stop],
        )


def count_trained(labels: Tensor) -> int:
    """Trained labels, counted on the host through numpy: batches are host tensors before they are moved."""
    if labels.device.type == "meta" or type(labels) is not Tensor:
        return labels.numel()
    return int((labels.numpy() != IGNORE).sum())


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Join batches of equal seq_len along rows."""
    return Batch(
        torch.cat([b.ids for b in rows]),
        torch.cat([b.labels for b in rows]),
        torch.cat([b.positions for b in rows]),
        tuple(d for b in rows for d in b.documents),
        sum(b.trained for b in rows),
        None if rows[0].weights is None else torch.cat([b.weights for b in rows if b.weights is not None]),
        None if rows[0].source is None else torch.cat([b.source for b in rows if b.source is not None]),
    )
