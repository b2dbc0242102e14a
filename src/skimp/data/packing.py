"""Lay documents into rows of exactly `seq_len` tokens. Two rules, named by what happens to a long document:

**split** (raw text): documents lie end to end and are cut wherever a row is full. Tokens in = tokens in rows,
but for a last row of a single token, which would predict nothing and is dropped and counted.

**whole** (`truncate`, `drop`, `error`): no document is cut by packing. Each goes, longest first, into the
fullest row that still has room (best-fit decreasing; rows <= 11/9 of the optimum + 1); what stays free in a
row is padding.

Without packing there is one document, or one piece of a long one, in a row.

Positions restart and attention stops at every document, and at every *piece* of a split one: a row never
looks into another row, so the last token of a piece predicts nothing although its successor is known. Of a
document of n tokens in k pieces n - k predictions are trained; where only some tokens are to be trained, those of
them that are not the first of their piece. A document in which none is (a prompt as long as a row, its answer
truncated away) is left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from skimp.core.errors import DataError


@dataclass(frozen=True)
class PackingCounts:
    """tokens_in = tokens + truncated_tokens + dropped_tokens + untrained_tokens + tail_tokens, always. `by_source` has
    the same counts (without pieces and padding) for each source id."""

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
    untrained_documents: int = 0
    untrained_tokens: int = 0
    tail_tokens: int = 0
    padding_tokens: int = 0
    trained_tokens: int = 0
    by_source: tuple[dict[str, int], ...] = ()


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


class _Tally:
    """Counts, of everything and by source."""

    def __init__(self, sources: np.ndarray) -> None:
        self.sources = sources
        self.number = int(sources.max(initial=-1)) + 1
        self.all: dict[str, int] = {}
        self.of: list[dict[str, int]] = [{} for _ in range(self.number)]

    def add(self, name: str, documents: np.ndarray, amounts: np.ndarray | None = None) -> None:
        """Count `amounts` (1 each when None) of the documents with these numbers."""
        each = np.bincount(self.sources[documents], amounts, minlength=self.number).astype(np.int64)
        self.all[name] = self.all.get(name, 0) + int(each.sum())
        for source, amount in enumerate(each):
            self.of[source][name] = self.of[source].get(name, 0) + int(amount)


def lay_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    seq_len: int,
    packing: bool = True,
    too_long: str = "split",
    sources: np.ndarray | None = None,
    place: Callable[[int], str] = lambda document: f"document {document}",
    trained_before: Callable[[np.ndarray], np.ndarray] | None = None,
    may_be_empty: bool = False,
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
        trained_before: places in the store -> trained tokens before each; None when every token is trained.
        may_be_empty: give a table without rows instead of raising.

    Raises:
        DataError: a document is too long under `error`, or no row is left.
    """
    starts, lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
    document = np.arange(len(starts), dtype=np.int64)
    tally = _Tally(np.zeros(len(starts), np.int64) if sources is None else sources)
    tally.add("documents_in", document)
    tally.add("tokens_in", document, lengths)
    longest = int(lengths.max(initial=0))
    over = lengths > seq_len if too_long != "split" else np.zeros(len(lengths), bool)
    if too_long == "error" and over.any():
        raise _too_long(int(np.argmax(over)), lengths, seq_len, int(over.sum()), place)
    if too_long == "drop":
        tally.add("dropped_documents", document[over])
        tally.add("dropped_tokens", document[over], lengths[over])
        starts, lengths, document, over = starts[~over], lengths[~over], document[~over], over[~over]
    kept = np.minimum(lengths, seq_len) if too_long == "truncate" else lengths
    if trained_before is not None and too_long != "split":
        some = _trained_in(starts, kept, trained_before) > 0
        tally.add("untrained_documents", document[~some])
        tally.add("untrained_tokens", document[~some], lengths[~some])
        starts, lengths, kept, document, over = starts[some], lengths[some], kept[some], document[some], over[some]
    if too_long == "truncate":
        tally.add("truncated_documents", document[over])
        tally.add("truncated_tokens", document[over], (lengths - kept)[over])

    if packing and too_long != "split":
        order, first = best_fit(kept, seq_len)
        starts, lengths, document = starts[order], kept[order], document[order]
    else:
        bounds = seq_len if packing else None
        starts, lengths, document, first = _cut_documents(starts, kept, document, seq_len, bounds)
    learnt = _trained_in(starts, lengths, trained_before)
    busy = np.add.reduceat(learnt, first[:-1]) > 0 if len(first) > 1 else np.zeros(0, bool)
    keep = np.repeat(busy, np.diff(first))
    tally.add("tail_tokens", document[~keep], lengths[~keep])
    first = np.append(0, np.cumsum(np.diff(first)[busy]))
    starts, lengths, document, learnt = starts[keep], lengths[keep], document[keep], learnt[keep]
    rows, tokens = len(first) - 1, int(lengths.sum())
    unique, pieces = np.unique(document, return_counts=True)
    tally.add("documents", unique)
    tally.add("tokens", document, lengths)
    tally.add("split_documents", unique[pieces > 1])
    tally.add("trained_tokens", document, learnt)
    tally.add("rows", document[first[:-1]])
    table = RowTable(
        seq_len, starts, lengths.astype(np.int32), first, tally.sources[document[first[:-1]]].astype(np.int32)
    )
    padding = rows * seq_len - tokens
    counts = PackingCounts(**tally.all, pieces=len(starts), padding_tokens=padding, by_source=tuple(tally.of))
    if rows == 0 and not may_be_empty:
        raise nothing_left(counts, seq_len, longest)
    return table, counts


def _trained_in(
    starts: np.ndarray, lengths: np.ndarray, trained_before: Callable[[np.ndarray], np.ndarray] | None
) -> np.ndarray:
    """(pieces,) int64: predictions trained in each: of its tokens but the first, which nothing before it predicts."""
    if trained_before is None or not len(starts):
        return lengths - 1
    both = trained_before(np.concatenate([starts + 1, starts + lengths]))
    return np.asarray(both[len(starts) :] - both[: len(starts)])


def nothing_left(
    counts: PackingCounts, seq_len: int, longest: int, name: str = "train", trains: bool = True
) -> DataError:
    """The error for a set without a row; `longest` is its longest document in tokens."""
    lost = counts.untrained_documents
    found = f"{counts.documents_in} documents, none of which fits and predicts; the longest has {longest} tokens"
    ways: list[str] | str = "give more text"
    if longest > seq_len:  # a whole document surely holds a trained token
        ways = [f"data.seq_len={longest}", *([] if lost else ["data.too_long=split"])]
    return DataError(
        f"rows of {seq_len} tokens" + ("" if name == "train" else f" of the set '{name}'"),
        found + (f"; in {lost} the prompt fills the row and leaves no trained token" if lost else ""),
        f"nothing is left to {'train' if trains else 'evaluate'} on",
        ways,
    )


def join_tables(tables: Sequence[RowTable]) -> RowTable:
    """Rows of several tables, one after another."""
    if len(tables) == 1:
        return tables[0]
    shift = np.cumsum([0, *(len(t.starts) for t in tables)])
    return RowTable(
        tables[0].seq_len,
        np.concatenate([t.starts for t in tables]),
        np.concatenate([t.lengths for t in tables]),
        np.append(0, np.concatenate([t.first[1:] + s for t, s in zip(tables, shift, strict=False)])).astype(np.int64),
        np.concatenate([t.source for t in tables]),
    )


def join_counts(counts: Sequence[PackingCounts]) -> PackingCounts:
    """The sum of several counts, source by source."""
    if len(counts) == 1:
        return counts[0]
    names = [f.name for f in fields(PackingCounts) if f.name != "by_source"]
    number = max(len(c.by_source) for c in counts)
    of: list[dict[str, int]] = [{} for _ in range(number)]
    for each in counts:
        for source, amounts in enumerate(each.by_source):
            of[source] = {k: of[source].get(k, 0) + n for k, n in amounts.items()}
    return PackingCounts(**{n: sum(getattr(c, n) for c in counts) for n in names}, by_source=tuple(of))


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
