"""Loops whose middle rounds are all alike, shortened in a search.

Chunk 2 of 64 holds, allocates and frees exactly what chunk 3 does. A search that simulates a hundred runs therefore
lets the first, one middle and the last round stand for all, and counts the middle one's time as often as it would
have run. Real runs, and the final simulation of a plan, always go through every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_short: ContextVar[bool] = ContextVar("skimp_short_loops", default=False)
_times: ContextVar[int] = ContextVar("skimp_times", default=1)


@contextmanager
def shortened() -> Iterator[None]:
    """Inside, `rounds` goes through three rounds at most."""
    token = _short.set(True)
    try:
        yield
    finally:
        _short.reset(token)


def times() -> int:
    """How many rounds the present one stands for."""
    return _times.get()


def rounds(items: Sequence[int]) -> Iterator[int]:
    """The items of a loop; when `shortened`, the first, one middle (standing for all of them) and the last."""
    if not _short.get() or len(items) <= 3:
        yield from items
        return
    yield items[0]
    token = _times.set(_times.get() * (len(items) - 2))
    try:
        yield items[1]
    finally:
        _times.reset(token)
    yield items[-1]
