"""Windows of a text that is read as it goes: about `window_rows` rows each, made from where the last one
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from skimp.core.errors import DataError
from skimp.data.packing import RowTable, lay_rows
from skimp.data.pipe import Frame, unmarked
from skimp.data.textdata import TextData


@dataclass(frozen=True)
class Place:
    """A token in the text: file, row and the row's byte, and the tokens of that document before it."""

    file: int = 0
    row: int = 1
    offset: int = 0
    skip: int = 0


@dataclass(frozen=True)
class Window:
    """Tokens (uint32), which of them are trained (None: all) and the rows made of them; where it begins and the
    next one does; what was left out."""

    tokens: np.ndarray
    trained: np.ndarray | None
    table: RowTable
    begins: Place
    ends: Place
    counts: dict[str, int]
    left_out: dict[str, int]


@dataclass
class _Pieces:
    """Documents, or pieces of them, gathered for a window."""

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.lengths)


class WindowMaker:
    """Cuts a stream of documents into windows.

    `split` with packing takes exactly window_rows x seq_len tokens, so rows are those of the text laid end to
    end, as in a stored text. `split` without packing takes window_rows pieces. The other rules take whole
    documents, each already shortened or left out, until they have that many tokens or rows.
    """

    def __init__(
        self,
        data: TextData,
        frames: Iterator[Frame],
        source_of: Sequence[int],
        where: Callable[[int, int], str],
    ) -> None:
        self.data = data
        self._frames = frames
        self._source_of = source_of
        self._where = where
        self._left_out: dict[str, int] = {}
        self._left: tuple[Frame, int, int] | None = None  # a frame, tokens used of it, tokens of its document before it

    def next_window(self, place: Place) -> Window | None:
        """The window that begins at `place`, where the last one ended; None at the end of the text."""
        first = self._next_frame(place.skip if self._left is None else 0)
        if first is None:
            return None
        self._left = first
        pieces: _Pieces = _Pieces()
        counts: dict[str, int] = {}
        if self.data.too_long == "split":
            counts["documents"] = self._gather_split(pieces)
        else:
            counts = self._gather_whole(pieces)
        # From the end of the last window, not the first document of this one: rows left out in between belong here.
        return self._close(pieces, counts, place, self._place_of(self._left))

    def rest(self) -> dict[str, int]:
        """Rows left out after the last window."""
        left_out, self._left_out = self._left_out, {}
        return left_out

    def _close(self, pieces: _Pieces, counts: dict[str, int], begins: Place, ends: Place) -> Window:
        tokens, trained = unmarked(np.concatenate(pieces.tokens) if pieces.tokens else np.zeros(0, np.uint32))
        lengths = np.array(pieces.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        before = None if trained is None else np.append(0, np.cumsum(trained))
        table, packed = lay_rows(
            starts,
            lengths,
            self.data.seq_len,
            self.data.packing,
            self.data.too_long,
            np.array(pieces.sources, np.int64),
            trained_before=None if before is None else lambda places: before[places],
            may_be_empty=True,
        )
        counts |= {"tokens": packed.tokens, "rows": packed.rows, "tail_tokens": packed.tail_tokens,
                   "padding_tokens": packed.padding_tokens, "trained_tokens": packed.trained_tokens}  # fmt: skip
        return Window(tokens, trained, table, begins, ends, counts, self.rest())

    def _gather_split(self, pieces: _Pieces) -> int:
        """Fill `pieces`; returns how many documents begin in this window."""
        seq, packing = self.data.seq_len, self.data.packing
        room, documents, row = self.data.window_rows * seq, 0, -1
        while room and (current := self._next_frame(0)) is not None:
            frame, used, before = current
            documents += frame.first and used == 0
            at = before + used  # tokens of this document already given; without packing a new piece every seq_len
            want = room if packing else min(room, seq - at % seq)
            taken = frame.tokens[used : used + want]
            fresh = row != frame.row or (frame.first and used == 0) or (not packing and at % seq == 0)
            if fresh:
                pieces.lengths.append(0)
                pieces.sources.append(self._source_of[frame.file])
            pieces.tokens.append(taken)
            pieces.lengths[-1] += len(taken)
            row = frame.row
            self._left = (frame, used + len(taken), before)
            ended = frame.last and used + len(taken) == len(frame.tokens)
            if packing:
                room -= len(taken)
            elif ended or (at + len(taken)) % seq == 0:
                room -= seq
        return documents

    def _gather_whole(self, pieces: _Pieces) -> dict[str, int]:
        seq, rule = self.data.seq_len, self.data.too_long
        wanted = self.data.window_rows * (seq if self.data.packing else 1)
        counts = dict.fromkeys(("documents", "truncated_documents", "truncated_tokens", "dropped_documents",
                                "dropped_tokens", "untrained_documents", "untrained_tokens"), 0)  # fmt: skip
        have = 0
        while have < wanted and (current := self._next_frame(0)) is not None:
            frame, length, kept = current[0], 0, np.zeros(0, np.uint32)
            while True:  # all blocks of the document; no more than a row of it is kept
                length += len(frame.tokens)
                kept = np.concatenate([kept, frame.tokens[: seq - len(kept)]])
                if frame.last:
                    break
                frame = next(self._frames)
            self._left = (frame, len(frame.tokens), length - len(frame.tokens))
            counts["documents"] += 1
            if length > seq and rule == "error":
                raise _too_long(self._where(frame.file, frame.row), length, seq)
            if length > seq and rule == "drop":
                counts["dropped_documents"] += 1
                counts["dropped_tokens"] += length
                continue
            trained = unmarked(kept)[1]
            if trained is not None and not trained[1:].any():
                counts["untrained_documents"] += 1
                counts["untrained_tokens"] += length
                continue
            counts["truncated_documents"] += length > len(kept)
            counts["truncated_tokens"] += length - len(kept)
            pieces.tokens.append(kept)
            pieces.lengths.append(len(kept))
            pieces.sources.append(self._source_of[frame.file])
            have += len(kept) if self.data.packing else 1
        return counts

    def _next_frame(self, skip: int) -> tuple[Frame, int, int] | None:
        """The frame in use while it has tokens left, else the next; `skip` tokens of the document are passed
        over.
        """
        if self._left is not None and self._left[1] < len(self._left[0].tokens):
            return self._left
        before = 0
        if self._left is not None and not self._left[0].last:
            before = self._left[2] + len(self._left[0].tokens)
        for frame in self._frames:
            if frame.dropped:
                self._left_out[frame.dropped] = self._left_out.get(frame.dropped, 0) + 1
                continue
            if frame.first:
                before = 0
            if before + len(frame.tokens) <= skip and not frame.last:
                before += len(frame.tokens)
                continue
            self._left = (frame, max(0, skip - before), before)
            if self._left[1] < len(frame.tokens):
                return self._left
            before, skip = 0, 0
        return None

    def _place_of(self, left: tuple[Frame, int, int]) -> Place:
        frame, used, before = left
        return Place(frame.file, frame.row, frame.offset, before + used)


def _too_long(where: str, length: int, seq_len: int) -> DataError:
    return DataError(
        f"{where}: a document of at most data.seq_len = {seq_len} tokens",
        f"{length} tokens",
        "data.too_long=error allows none",
        [
            "data.too_long=split cuts it into rows, losing nothing",
            "data.too_long=truncate or drop loses text",
        ],
    )
