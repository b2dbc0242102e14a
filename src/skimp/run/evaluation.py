"""Loss, perplexity and token accuracy of any opened model, in memory that does not grow with the rows.

What a batch needs is simulated before a weight is loaded, as a training step is: the same head on tensors that have
shapes and no values. The number of rows that go through at once follows from it and the budget; the sums do not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.batch import Batch
from skimp.core.errors import DoesNotFit
from skimp.core.memory.process import give_back, resident
from skimp.core.memory.tracker import Tracker
from skimp.core.memory.warm import warm_baseline
from skimp.core.structure import read_structure
from skimp.core.units import format_bytes
from skimp.plan.places import Places
from skimp.recipe import host_budget
from skimp.run.found import Found
from skimp.run.opened import Opened, dress
from skimp.run.skeleton import simulate_tensors, skeleton

#: Tokens that go through at once where memory allows: more make a CPU no faster.
WIDE = 2048
#: Tokens whose logits exist at once, when the head's own rule takes too much.
NARROW = 64


@dataclass(frozen=True)
class Way:
    """How many rows go through at once, tokens of logits (None: the head's rule), and the bytes that takes.

    Attributes:
        tracked: peak of all tensors, weights included; resident: of the whole process.
    """

    rows: int
    chunk: int | None
    tracked: int
    resident: int


@dataclass(frozen=True)
class Score:
    """One set. loss: mean over the trained tokens, in nats; accuracy: share of tokens predicted right."""

    name: str
    loss: float
    perplexity: float
    accuracy: float
    tokens: int
    rows: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Reading:
    """How far it is: rows done and in all, trained tokens a second, resident bytes."""

    rows: int
    total: int
    tokens_per_second: float
    seconds_left: float
    memory: int


def choose_way(found: Found, dtype: torch.dtype, seq_len: int, budget: int | None) -> Way:
    """The widest way that fits the budget, by simulation; nothing is loaded.

    Args:
        budget: bytes of the whole process; None takes what this machine has.

    Raises:
        DoesNotFit: not even one row with few logits fits; says how much that takes.
    """
    here = host_budget()
    limit = min(budget, here.bytes) if budget is not None else here.bytes
    places = Places("cpu", limit, limit, 0, 0, ())
    widest = max(1, WIDE // seq_len)
    ways = [(rows, None) for rows in sorted({widest, max(1, widest // 2), 1}, reverse=True)] + [(1, NARROW)]
    way = None
    for rows, chunk in ways:
        tracked = simulated_peak(found, dtype, rows, seq_len, chunk)
        if way is None:
            places = Places("cpu", limit, limit, 0, warm_baseline(), ())
        way = Way(rows, chunk, tracked, places.resident_peak(tracked))
        if way.resident <= limit:
            return way
    assert way is not None
    instead = [f"--budget {-(-way.resident // 10**6)}MB"] if budget is not None else ["end other programs"]
    if dtype == torch.float32:
        instead.append("--precision bf16: half the bytes of weights and activations, another rounding")
    raise DoesNotFit(
        f"evaluating {found.asked} within {format_bytes(limit)}",
        f"one row of {seq_len} tokens takes {format_bytes(way.resident)}",
        f"weights and activations {format_bytes(tracked)}, the rest is the process itself",
        [*instead, f"a shorter --seq than {seq_len}"],
    )


def simulated_peak(found: Found, dtype: torch.dtype, rows: int, seq_len: int, chunk: int | None = None) -> int:
    """Peak bytes of all tensors while one batch is scored."""
    mode = FakeTensorMode()
    model = skeleton(found.config, dtype)
    structure = read_structure(model)
    simulate_tensors(model, dtype, mode)
    model.requires_grad_(False)
    opened = dress(found, model, structure, dtype, None)
    opened.head.chunk = chunk
    with mode:
        ids, labels, positions = (torch.zeros(rows, seq_len, dtype=torch.int64) for _ in range(3))
        source = torch.zeros(rows, dtype=torch.int64)
    documents = (0, seq_len - 1, seq_len) if seq_len > 2 else (0, seq_len)
    batch = Batch(ids, labels, positions, (documents,) * rows, rows * seq_len, source=source)
    tracker = Tracker()
    with mode, tracker:
        tracker.hold(model.parameters(), "weights")
        tracker.hold(model.buffers(), "weights")
        tracker.hold(batch.tensors(), "batch")
        opened.head.evaluate([batch, batch])  # whatever the first leaves behind is there in the second
    return tracker.peak.total


def score(
    opened: Opened,
    rows: Any,
    name: str,
    way: Way,
    limit: int | None = None,
    show: Callable[[Reading], None] | None = None,
) -> Score:
    """Score the first `limit` rows (None: all) of a set.

    Args:
        rows: the data room's `Rows`.
        show: called after every batch.
    """
    total = len(rows) if limit is None else min(limit, len(rows))
    begin = time.perf_counter()

    def watched() -> Iterator[Batch]:
        done = tokens = 0
        for batch in rows.in_order(way.rows, limit):
            yield batch  # the head is done with it when it asks for the next one
            done, tokens = done + batch.rows, tokens + batch.trained
            if show is not None:
                passed = time.perf_counter() - begin
                left = passed / done * (total - done)
                show(Reading(done, total, tokens / max(passed, 1e-9), left, resident().now))

    opened.head.chunk = way.chunk
    loss, accuracy, tokens = opened.head.evaluate(watched())
    opened.model.eval()
    give_back()
    return Score(name, loss, perplexity(loss), accuracy, tokens, total, time.perf_counter() - begin)


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
