"""Several sources in stated shares: which one gives the next row is a function of the rows given so far.

The source that is furthest behind its share gives the next row (the first of them, of equal ones), so that after n
rows every source has given its share of n to within one row or so, with no random draw to remember: the position is
the counts and each source's own position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from skimp.core.batch import Batch, stack_rows
from skimp.data.steps import Steps
from skimp.data.stream import VERSION, TokenStream, check_state
from skimp.data.streaming import StreamCounts, StreamedText


class MixedStream(Steps):
    """Like `TokenStream`, over several of them; a context manager that ends the children of those that stream.

    Args:
        streams: one a source, each giving one row a step; endless to repeat, of one epoch to stop.
        names: of the sources, for counts.
        weights: the share of each; they sum to 1.
        rows_per_step: rows in each batch.
        identity: facts that must be the same when a state is loaded.
        rows_per_epoch: rows that count as one epoch; None when not known.
    """

    def __init__(
        self,
        streams: Sequence[TokenStream | StreamedText],
        names: Sequence[str],
        weights: Sequence[float],
        rows_per_step: int,
        identity: dict[str, Any],
        rows_per_epoch: int | None = None,
    ) -> None:
        self.streams = list(streams)
        self.names = list(names)
        self.weights = list(weights)
        self.rows_per_step = rows_per_step
        self.identity = dict(identity)
        self.rows_per_epoch = rows_per_epoch
        self.rows_given = [0] * len(self.streams)

    def next_step(self) -> Batch:
        """The next batch; `source` is each row's place in the list of sources.

        Raises:
            StopIteration: a source that does not repeat has given all it has.
        """
        parts: list[Batch] = []
        while len(parts) < self.rows_per_step:
            source = next_source(self.rows_given, self.weights)
            try:
                row = self.streams[source].next_step()
            except StopIteration:
                break
            parts.append(replace(row, source=torch.full((row.rows,), source, dtype=torch.int64)))
            self.rows_given[source] += row.rows
        if not parts:
            raise StopIteration
        return self.counted(stack_rows(parts))

    def given(self) -> dict[str, dict[str, int]]:
        """What each source gave up to now: rows, trained tokens, and whole passes over it."""
        return {
            name: {"rows": rows, "trained_tokens": stream.trained_tokens, "passes": stream.epoch}
            for name, rows, stream in zip(self.names, self.rows_given, self.streams, strict=True)
        }

    def total(self) -> StreamCounts:
        """What the streamed sources read up to now."""
        out = StreamCounts()
        for stream in self.streams:
            if isinstance(stream, StreamedText):
                counts = vars(stream.total())
                out = out.plus({k: v for k, v in counts.items() if k != "left_out"}, counts["left_out"])
        return out

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings: the position after the last batch given."""
        return {
            "version": VERSION, "kind": "mixed", "identity": self.identity, "rows_given": list(self.rows_given),
            "steps": self.steps, "trained_tokens": self.trained_tokens,
            "sources": [stream.state_dict() for stream in self.streams],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            CheckpointError: the state is of other data.
        """
        check_state(state, self.identity, "mixed")
        for stream, saved in zip(self.streams, state["sources"], strict=True):
            stream.load_state_dict(saved)
        self.rows_given = list(state["rows_given"])
        self.steps, self.trained_tokens = state["steps"], state["trained_tokens"]

    def close(self) -> None:
        """End the children."""
        for stream in self.streams:
            stream.close()

    def __enter__(self) -> MixedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def next_source(given: Sequence[int], weights: Sequence[float]) -> int:
    """The source furthest behind its share of the rows given and the next one."""
    rows = sum(given) + 1
    behind = [weight * rows - has for weight, has in zip(weights, given, strict=True)]
    return behind.index(max(behind))


def rows_until_out(rows: Sequence[int], weights: Sequence[float]) -> int:
    """Rows a mixture surely gives before a source runs out: a source is never a whole row ahead of its share, so n
    rows take fewer than weight x n + 1 of it."""
    return max(0, min(int((has - 1) / weight) for has, weight in zip(rows, weights, strict=True)))
