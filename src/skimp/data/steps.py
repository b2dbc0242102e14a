"""What every stream of batches shares: it is its own iterator, and counts what it gave."""

from __future__ import annotations

from collections.abc import Iterator

from skimp.core.batch import Batch


class Steps:
    """Batches of one optimizer step each.

    Attributes:
        steps, trained_tokens: given so far; part of a stream's state.
    """

    steps = 0
    trained_tokens = 0

    def next_step(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        raise NotImplementedError

    def counted(self, batch: Batch) -> Batch:
        """The batch, counted as given."""
        self.steps += 1
        self.trained_tokens += batch.trained
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_step()
