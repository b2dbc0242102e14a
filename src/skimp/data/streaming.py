"""Text tokenised while it is trained on: bounded memory, no waiting, resumable to the row.

The text is taken in windows of about `window_rows` rows. A window is a function of the place in the text
where it begins; its rows are shuffled by (seed, epoch, window). So the whole position is that place, the
window's number and the rows already given: on resume the child enters the text there and the same window is
made again. No tokens are saved, and a second resume is the same act as the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from skimp.core.batch import Batch, stack_rows
from skimp.core.errors import DataError
from skimp.data import pipe
from skimp.data.child import Child, raise_reported
from skimp.data.rows import Rows
from skimp.data.sources import SourceFile
from skimp.data.steps import Steps
from skimp.data.stream import VERSION, check_state, shuffled
from skimp.data.textdata import TextData
from skimp.data.vocabulary import check_vocabulary
from skimp.data.window import Place, Window, WindowMaker


@dataclass
class StreamCounts:
    """What was read, up to and with the window in use; over all epochs."""

    documents: int = 0
    tokens: int = 0
    rows: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    tail_tokens: int = 0
    padding_tokens: int = 0
    truncated_documents: int = 0
    untrained_documents: int = 0
    untrained_tokens: int = 0
    trained_tokens: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def plus(self, counts: dict[str, int], left_out: dict[str, int]) -> StreamCounts:
        old = asdict(self)
        added = {k: v + counts.get(k, 0) for k, v in old.items() if k != "left_out"}
        reasons = {why: old["left_out"].get(why, 0) + left_out.get(why, 0) for why in {**old["left_out"], **left_out}}
        return StreamCounts(**added, left_out=reasons)


class StreamedText(Steps):
    """Like `TokenStream`, over text that is read as it goes; a context manager that ends its child.

    Args:
        data: the description.
        job: tokenizer, field and encoding for the child.
        files: in reading order; `source_of` gives the source id of each.
        rows_per_step: rows in each batch.
        identity: facts that must be the same when a state is loaded.
        epochs: end after so many; None never ends.
        vocabulary: token embeddings of the model, or None.
    """

    def __init__(
        self,
        data: TextData,
        job: dict[str, Any],
        files: Sequence[SourceFile],
        source_of: Sequence[int],
        rows_per_step: int,
        identity: dict[str, Any],
        epochs: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.data = data
        self.rows_per_step = rows_per_step
        self.identity = dict(identity)
        self.epochs = epochs
        self.vocabulary = vocabulary
        self.rows_per_epoch: int | None = None
        self.epoch = 0
        self.counts = StreamCounts()  # before the window in use
        self._job = job
        self._files = list(files)
        self._source_of = list(source_of)
        self._child: Child | None = None
        self._frames: Iterator[pipe.Frame | dict[str, Any]] = iter(())
        self._tokenizer: dict[str, Any] = {}
        self._maker: WindowMaker | None = None
        self._window: Window | None = None
        self._rows: Rows | None = None
        self._order = np.zeros(0, np.int64)
        self._number = 0  # of the window in use, within its epoch
        self._given = 0  # rows of it already given
        self._rows_this_epoch = 0
        self._enter = Place()  # where the window in use begins

    def next_step(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: `epochs` are over.
            DataError: a row further on is malformed; the batches before it were given.
        """
        parts: list[Batch] = []
        missing = self.rows_per_step
        while missing and self._ready():
            rows = self._rows
            if rows is None:
                raise RuntimeError("a window without rows")
            taken = self._order[self._given : self._given + missing]
            parts.append(rows.batch(taken))
            self._given += len(taken)
            missing -= len(taken)
        if not parts:
            raise StopIteration
        return self.counted(stack_rows(parts))

    def tokenizer_facts(self) -> dict[str, Any]:
        """size, end and begin of the tokenizer, and the `kinds` of the sources; starts the child and reads its
        first document."""
        self._begin(Place())
        for frame in self._documents():
            if not frame.dropped:
                return dict(self._tokenizer)
        raise self._nothing()

    def total(self) -> StreamCounts:
        """What was read up to now."""
        window = self._window
        return self.counts if window is None else self.counts.plus(window.counts, window.left_out)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings: the position after the last batch given."""
        return {
            "version": VERSION, "kind": "streamed", "identity": self.identity, "epoch": self.epoch,
            "steps": self.steps, "trained_tokens": self.trained_tokens, "window": asdict(self._enter),
            "number": self._number, "given": self._given, "counts": asdict(self.counts),
            "rows_this_epoch": self._rows_this_epoch, "rows_per_epoch": self.rows_per_epoch,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: the state is of other data.
        """
        check_state(state, self.identity, "streamed")
        self.close()
        self.epoch, self.steps, self.trained_tokens = state["epoch"], state["steps"], state["trained_tokens"]
        self.counts = StreamCounts(**state["counts"])
        self.rows_per_epoch, self._rows_this_epoch = state["rows_per_epoch"], state["rows_this_epoch"]
        self._enter, self._number = Place(**state["window"]), state["number"]
        self._given = state["given"]
        self._maker = self._window = None

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __enter__(self) -> StreamedText:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_child", None) is not None:
            self.close()

    def _ready(self) -> bool:
        """Have a row to give, going on to the next window or epoch; False when the epochs are over."""
        while True:
            if self.epochs is not None and self.epoch >= self.epochs:
                return False
            if self._window is not None and self._given < self._window.table.rows:
                return True
            if self._window is not None:
                self._leave_window(self._window)
            if self._maker is None:
                self._begin(self._enter)
                self._maker = WindowMaker(self.data, self._documents(), self._source_of, self._where)
            window = self._maker.next_window(self._enter)
            if window is None:
                self._end_epoch()
            elif window.table.rows:
                self._take(window)
            else:  # everything in it was dropped
                self._leave_window(window)

    def _take(self, window: Window) -> None:
        self._window, self._enter = window, window.begins
        tokens, trained = window.tokens, window.trained
        self._rows = Rows(
            window.table,
            lambda start, length: tokens[start : start + length],
            self._tokenizer["end"],
            None if trained is None else lambda start, length: trained[start : start + length],
        )
        self._order = shuffled(window.table.rows, self.data.seed, self.epoch, self._number)

    def _leave_window(self, window: Window) -> None:
        self.counts = self.counts.plus(window.counts, window.left_out)
        self._rows_this_epoch += window.table.rows
        self._enter, self._number, self._given = window.ends, self._number + 1, 0
        self._window = self._rows = None

    def _end_epoch(self) -> None:
        if self._maker is not None:
            self.counts = self.counts.plus({}, self._maker.rest())
        if self._rows_this_epoch == 0:
            raise self._nothing()
        self.rows_per_epoch, self._rows_this_epoch = self._rows_this_epoch, 0
        self.epoch, self._number, self._given, self._enter = self.epoch + 1, 0, 0, Place()
        self._maker = None
        self.close()

    def _begin(self, place: Place) -> None:
        self.close()
        stream = {
            "files": [vars(f) for f in self._files],
            "file": place.file,
            "row": place.row,
            "offset": place.offset,
            "source_of": self._source_of,
            "formats": self._job.get("formats"),
        }
        self._child = Child({**self._job, "stream": stream})
        self._frames = pipe.receive(self._child.out)

    def _documents(self) -> Iterator[pipe.Frame]:
        for frame in self._frames:
            if isinstance(frame, pipe.Frame):
                self._check(frame)
                yield frame
            elif frame["event"] == "error":
                raise_reported(frame)
            elif frame["event"] == "tokenizer":
                self._tokenizer = frame
            elif frame["event"] == "done":
                return
        if self._child is not None:
            raise self._child.death()

    def _check(self, frame: pipe.Frame) -> None:
        if self.vocabulary is not None:
            highest = max(int(pipe.unmarked(frame.tokens)[0].max(initial=0)), self._tokenizer["end"])
            check_vocabulary(highest, self._tokenizer["size"], self.vocabulary, self._where(frame.file, frame.row))

    def _where(self, file: int, row: int) -> str:
        return f"{self._files[file].path}, row {row}"

    def _nothing(self) -> DataError:
        total = self.total()
        reasons = {**total.left_out, "without a trained token within a row": total.untrained_documents}
        lost = ", ".join(f"{n} {why}" for why, n in reasons.items() if n)
        return DataError(
            f"data from {', '.join(dict.fromkeys(f.path for f in self._files[:3]))}",
            f"{total.documents} usable documents, 0 rows of {self.data.seq_len} tokens"
            + (f" ({lost})" if lost else ""),
            "nothing is left to train on",
            [f"data.seq_len={2 * self.data.seq_len}", "give more text"]
            if total.untrained_documents
            else ["data.too_long=split", "give more text"],
        )
