"""Rows of a table as a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from skimp.core.batch import IGNORE, Batch
from skimp.data.packing import RowTable


class Rows:
    """Rows that can be read in any order.

    Args:
        table: which tokens each row is made of.
        read: (start, length) -> tokens.
        pad: the id put where a row is not full; it is masked by place, never by value, so it may be the end
            token.
        trained: (start, length) -> bool a token, whether it is trained, or None for all; None: every one is.
    """

    def __init__(
        self,
        table: RowTable,
        read: Callable[[int, int], np.ndarray],
        pad: int,
        trained: Callable[[int, int], np.ndarray | None] | None = None,
    ) -> None:
        self.table = table
        self._trained = trained
        self.pad = pad
        self._read = read

    def __len__(self) -> int:
        return self.table.rows

    @property
    def seq_len(self) -> int:
        return self.table.seq_len

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The rows with these indices: ids, labels, positions (rows, seq_len) int64 and host offsets."""
        shape = (len(indices), self.seq_len)
        ids = np.full(shape, self.pad, np.int64)
        labels = np.full(shape, IGNORE, np.int64)
        positions = np.empty(shape, np.int64)
        documents, trained = [], 0
        for row, index in enumerate(indices):
            offsets = self._fill(int(index), ids[row], labels[row], positions[row])
            documents.append(offsets)
        trained = int(np.count_nonzero(labels != IGNORE))
        source = self.table.source[np.asarray(indices, np.int64)].astype(np.int64)
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            torch.from_numpy(positions),
            tuple(documents),
            trained,
            source=torch.from_numpy(source),
        )

    def in_order(self, rows_per_batch: int, limit: int | None = None) -> Iterator[Batch]:
        """The first `limit` rows (None: all), unshuffled; the last batch may be smaller."""
        number = len(self) if limit is None else min(limit, len(self))
        for start in range(0, number, rows_per_batch):
            yield self.batch(np.arange(start, min(start + rows_per_batch, number)))

    def _fill(self, index: int, ids: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> tuple[int, ...]:
        first, last = int(self.table.first[index]), int(self.table.first[index + 1])
        starts, lengths = self.table.starts[first:last], self.table.lengths[first:last]
        ends = np.cumsum(lengths, dtype=np.int64)
        used = int(ends[-1])
        if int(starts[-1] + lengths[-1] - starts[0]) == used and (np.diff(starts) > 0).all():
            starts, lengths, stops = starts[:1], np.array([used]), np.array([used])  # neighbours: one read
        else:
            stops = ends
        labels[: used - 1] = 0
        for start, length, stop in zip(starts, lengths, stops, strict=True):
            ids[stop - length : stop] = self._read(int(start), int(length))
            trained = None if self._trained is None else self._trained(int(start), int(length))
            if trained is not None:  # of a token as what is predicted, so it masks the label before it
                labels[stop - length : stop - 1][~trained[1:]] = IGNORE
                if stop > length and not trained[0]:
                    labels[stop - length - 1] = IGNORE
        predicted = labels[: used - 1] != IGNORE
        labels[: used - 1][predicted] = ids[1:used][predicted]
        labels[ends - 1] = IGNORE  # the last token of a document, or piece, predicts nothing
        begins = np.concatenate([[0], ends]) if used < self.seq_len else np.concatenate([[0], ends[:-1]])
        positions[:] = np.arange(self.seq_len)
        positions -= np.repeat(begins, np.diff(np.append(begins, self.seq_len)))
        return (*(int(b) for b in begins), self.seq_len)
