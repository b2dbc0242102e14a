"""Lay documents into rows of exactly `seq_len` tokens. Two rules, named by what happens to a long document:

**split** (raw text): documents lie end to end and are cut wherever a row is full. Tokens in = tokens in rows,
but for a last row of a single token, which would predict nothing and is dropped and counted.

**whole** (`truncate`, `drop`, `error`): no document is cut by packing. Each goes, longest first, into the
fullest row that still has room (best-fit decreasing; rows <= 11/9 of the optimum + 1); what stays free in a
row is padding.

Without packing there is one document, or one piece of a long one, in a row.

Positions restart and attention stops at every document, and at every *piece* of a split one: a row never
looks into another row, so the last token of a piece predicts nothing although its successor is known. Of a
document of n tokens in k pieces n - k predictions are trained.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from skimp.core.errors import DataError


@dataclass(frozen=True)
class PackingCounts:
    """tokens_in = tokens + truncated_tokens + dropped_tokens + tail_tokens, always."""

    documents_in: int
    tokens_in: int
    documents: int
    tokens: int
    rows: int
    pieces: int
    split_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    tail_tokens: int = 0
    padding_tokens: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class RowTable:
    """Which tokens each row is made of, in 12 bytes a piece and 12 a row.

    Row r is the pieces `first[r]:first[r + 1]`; piece p is the tokens `starts[p] : starts[p] + lengths[p]` of
    the store. `source` is the source id of the first document of each row.
    """

    seq_len: int
    starts: np.ndarray  # (pieces,) int64
    lengths: np.ndarray  # (pieces,) int32
    first: np.ndarray  # (rows + 1,) int64
    source: np.ndarray  # (rows,) int32

    @property
    def rows(self) -> int:
        return len(self.first) - 1


def lay_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    packing: bool = True,
    too_long: str = "split",
    sources: np.ndarray | None = None,
    place: Callable[[int], str] = lambda document: f"document {document}",
) -> tuple[RowTable, PackingCounts]:
    """Make the row table of one epoch.

    Args:
        starts: (documents,) int64, where each document begins in the store.
        lengths: (documents,) its tokens, at least 1 each.
        seq_len: tokens in a row.
        packing: several documents in a row, or one.
        too_long: split, truncate, drop or error.
        sources: (documents,) source ids, or None for 0.
        place: file and row of a document, for the message of `error`.

    Raises:
        DataError: a document is too long under `error`, or no row is left.
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    document = np.arange(len(starts), dtype=np.int64)
    counts = {"documents_in": len(lengths), "tokens_in": int(lengths.sum())}
    longest = int(lengths.max(initial=0))
    if too_long != "split":
        over = lengths > seq_len
        if too_long == "error" and over.any():
            raise _too_long(int(np.argmax(over)), lengths, seq_len, int(over.sum()), place)
        if too_long == "truncate":
            counts["truncated_documents"] = int(over.sum())
            counts["truncated_tokens"] = int((lengths[over] - seq_len).sum())
            lengths = np.minimum(lengths, seq_len)
        if too_long == "drop":
            counts["dropped_documents"] = int(over.sum())
            counts["dropped_tokens"] = int(lengths[over].sum())
            starts, lengths, document = starts[~over], lengths[~over], document[~over]

    if packing and too_long != "split":
        order, first = best_fit(lengths, seq_len)
        starts, lengths, document = starts[order], lengths[order], document[order]
    else:
        bounds = seq_len if packing else None
        starts, lengths, document, first = _cut_documents(starts, lengths, document, seq_len, bounds)
    starts, lengths, document, first, tail = _without_idle_rows(starts, lengths, document, first)
    rows, tokens = len(first) - 1, int(lengths.sum())
    if rows == 0:
        raise DataError(
            f"rows of {seq_len} tokens",
            f"{counts['documents_in']} documents, none of which fits and predicts; the longest has {longest}",
            "nothing is left to train on",
            [f"data.seq_len={longest}", "data.too_long=split"] if longest > seq_len else "give more text",
        )
    kept, pieces = np.unique(document, return_counts=True)
    row_source = np.zeros(rows, np.int32) if sources is None else sources[document[first[:-1]]].astype(np.int32)
    table = RowTable(seq_len, starts, lengths.astype(np.int32), first, row_source)
    return table, PackingCounts(
        **counts,
        documents=len(kept),
        tokens=tokens,
        rows=rows,
        pieces=len(starts),
        split_documents=int((pieces > 1).sum()),
        tail_tokens=tail,
        padding_tokens=rows * seq_len - tokens,
        trained_tokens=tokens - len(starts),
    )


def _cut_documents(
    starts: np.ndarray, lengths: np.ndarray, document: np.ndarray, seq_len: int, end_to_end: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut at row ends: of the documents laid end to end, or (None) of each document on its own."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    if end_to_end is not None:
        total = int(ends[-1]) if len(ends) else 0
        cuts = np.unique(np.concatenate([begins, np.arange(0, total, seq_len, dtype=np.int64)]))
        owner = np.searchsorted(ends, cuts, side="right")
        length = np.diff(np.append(cuts, total))
        row = cuts // seq_len
        first = np.searchsorted(row, np.arange(-(-total // seq_len) + 1))
        return starts[owner] + cuts - begins[owner], length, document[owner], first
    pieces = -(-lengths // seq_len)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    within = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * seq_len
    length = np.minimum(lengths[owner] - within, seq_len)
    return starts[owner] + within, length, document[owner], np.arange(len(owner) + 1)


def _without_idle_rows(
    starts: np.ndarray, lengths: np.ndarray, document: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Leave out rows whose pieces are all of one token: they predict nothing. Returns the tokens left out."""
    in_row = np.diff(first)
    busy = np.add.reduceat(lengths, first[:-1]) > in_row if len(in_row) else np.zeros(0, bool)
    if busy.all():
        return starts, lengths, document, first, 0
    keep = np.repeat(busy, in_row)
    tail = int(lengths[~keep].sum())
    return starts[keep], lengths[keep], document[keep], np.append(0, np.cumsum(in_row[busy])), tail


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: (order of the items by row, (rows + 1,) where each row begins in it).

    Ties go to the row opened first, so the result is one function of the lengths. The tightest row with room
    is the lowest set bit of an integer that has bit c set while some row has c tokens free: O(items x
    capacity / 64).
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(order), np.int64)
    free: dict[int, list[int]] = {}
    there = 0
    opened = 0
    for item in order:
        need = int(lengths[item])
        fitting = there >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            heap = free[room]
            row = heapq.heappop(heap)
            if not heap:
                there ^= 1 << room
        else:
            room, row, opened = capacity, opened, opened + 1
        row_of[item] = row
        if left := room - need:
            heapq.heappush(free.setdefault(left, []), row)
            there |= 1 << left
    by_row = order[np.argsort(row_of[order], kind="stable")]
    return by_row, np.append(0, np.cumsum(np.bincount(row_of, minlength=opened))).astype(np.int64)


def _too_long(document: int, lengths: np.ndarray, seq_len: int, number: int, place: Callable[[int], str]) -> DataError:
    return DataError(
        f"{place(document)}: a document of at most data.seq_len = {seq_len} tokens",
        f"{int(lengths[document])} tokens" + (f", and {number - 1} more such documents" if number > 1 else ""),
        "data.too_long=error allows none",
        [
            "data.too_long=split cuts it into rows, losing nothing",
            "data.too_long=truncate or drop loses text and says how much",
            f"data.seq_len={int(lengths.max())} holds the longest",
        ],
    )
