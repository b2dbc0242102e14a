"""What trains is chosen on the run's own text, for adapters that ask for it: once the weights are there, before step 1.

The first rows of the text are looked at one by one, whatever the plan's micro-batch is: which units train must not
depend on how a step is cut. A stream of its own gives them, so that training sees every row it would have seen. A
resume reads the choice from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from torch import Tensor

from skimp.core.batch import Batch
from skimp.core.memory.process import trim
from skimp.core.memory.tracker import scope
from skimp.core.position import declared_position
from skimp.core.read import is_simulated
from skimp.run.build import Run


def choose_on_text(run: Run, batches: Iterable[Batch]) -> None:
    """Let the adapter look at rows of `batches` and choose; weights and what they train stay as they are.

    Raises:
        SkimpError: no batch, or what cannot be measured on this base.
    """
    adapter = run.adapter
    assert adapter is not None
    real = not is_simulated(run.head.weight)

    def loss(row: Batch) -> Tensor:
        with declared_position(0, 0), scope("activations", "choose"):
            # A row of nothing but padding has no loss, and adds none.
            found = run.head.loss(row, max(1, row.trained))
        if real:
            trim()
        return found

    with scope(phase="choose"):
        adapter.look((row for batch in batches for row in batch.split(1)), run.head.walk, loss)


def first_batches(text: Any, recipe: Any, count: int) -> Iterator[Batch]:
    """The first `count` steps' rows of the run, from a stream of its own; fewer where the text ends before."""
    with closing(text.prepared.stream(recipe.train.batch_tokens)) as stream:
        for _ in range(count):
            try:
                batch = stream.next_step()
            except StopIteration:
                return
            yield batch
