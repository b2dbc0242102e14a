"""The endless, resumable stream of optimizer-step batches.

Every row comes once an epoch, in an order that is a function of (seed, epoch) alone, so a run resumed in
epoch 7 sees epoch 7's order. A batch may reach over the end of an epoch into the next, so that every step has
the same number of rows; with `epochs` given the stream ends instead, and its last batch may be smaller and
counts its own trained tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from skimp.core.batch import Batch
from skimp.core.errors import CheckpointError, RecipeError
from skimp.data.rows import Rows
from skimp.data.steps import Steps

VERSION = 1


def shuffled(number: int, seed: int, epoch: int, window: int = 0) -> np.ndarray:
    """(number,) int64, a permutation drawn from Philox keyed by (seed, epoch), its counter begun at `window`
    · 2⁶⁴.

    Built from raw 64-bit words and a stable sort: both are fixed for good, `Generator.permutation` is not.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)
    philox = np.random.Philox(key=key, counter=np.array([0, window, 0, 0], np.uint64))
    return np.argsort(philox.random_raw(number), kind="stable")


def rows_of(batch_tokens: int, seq_len: int) -> int:
    """Rows in an optimizer step.

    Raises:
        RecipeError: `batch_tokens` is not a multiple of `seq_len`.
    """
    if batch_tokens < seq_len or batch_tokens % seq_len:
        below = batch_tokens // seq_len * seq_len
        near = [f"train.batch_tokens={n}" for n in (below, below + seq_len) if n >= seq_len]
        raise RecipeError(
            "train.batch_tokens: a multiple of data.seq_len",
            f"{batch_tokens}, with rows of {seq_len}",
            instead=near,
        )
    return batch_tokens // seq_len


def check_state(state: dict[str, Any], identity: dict[str, Any], kind: str) -> None:
    """Refuse a position in other data.

    Raises:
        CheckpointError: names the facts that differ.
    """
    if state.get("version") != VERSION or state.get("kind") != kind:
        raise CheckpointError(
            f"resume: the position in the data, {kind} form {VERSION}",
            f"{state.get('kind', 'none')} form {state.get('version')}",
            instead="resume with data.streaming as it was and the skimp that wrote the checkpoint",
        )
    saved = state["identity"]
    differing = [k for k in sorted({*saved, *identity}) if saved.get(k) != identity.get(k)]
    if differing:
        raise CheckpointError(
            "resume: the position in the data",
            "; ".join(f"{k} was {saved.get(k)!r} and is {identity.get(k)!r}" for k in differing),
            "the same position would be other text: some rows twice, others never",
            ["put it back as it was", "start a new run from the checkpoint's weights"],
        )


class TokenStream(Steps):
    """Batches of a whole optimizer step; the caller cuts them into micro-batches.

    Args:
        rows: the rows of one epoch.
        rows_per_step: rows in each batch.
        seed: of the order.
        identity: facts that must be the same when a state is loaded (content key, seq_len, packing rules …).
        epochs: end after so many; None never ends.
    """

    def __init__(
        self, rows: Rows, rows_per_step: int, seed: int, identity: dict[str, Any], epochs: int | None = None
    ) -> None:
        self.rows = rows
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.epochs = epochs
        self.identity = dict(identity)
        self.epoch = 0
        self.position = 0  # rows of this epoch already given
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def rows_per_epoch(self) -> int:
        return len(self.rows)

    def order(self, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch, (rows,) int64."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, shuffled(len(self.rows), self.seed, epoch))
        return self._order[1]

    def next_step(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: `epochs` are over.
        """
        indices: list[np.ndarray] = []
        missing = self.rows_per_step
        while missing:
            if self.position == len(self.rows):
                self.epoch, self.position = self.epoch + 1, 0
            if self.epochs is not None and self.epoch >= self.epochs:
                break
            taken = self.order(self.epoch)[self.position : self.position + missing]
            indices.append(taken)
            self.position += len(taken)
            missing -= len(taken)
        if not indices:
            raise StopIteration
        return self.counted(self.rows.batch(np.concatenate(indices)))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, JSON-ready: the position after the last batch given."""
        return {
            "version": VERSION, "kind": "stored", "identity": self.identity, "epoch": self.epoch,
            "position": self.position, "steps": self.steps, "trained_tokens": self.trained_tokens,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. The step size may differ: the position is in rows.

        Raises:
            CheckpointError: the state is of other data.
        """
        check_state(state, self.identity, "stored")
        self.epoch, self.position = state["epoch"], state["position"]
        self.steps, self.trained_tokens = state["steps"], state["trained_tokens"]

    def close(self) -> None:
        """Nothing to end; there for symmetry with a streamed text."""

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
