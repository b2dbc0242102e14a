"""Where in a run a forward is: which optimizer step, and which of the step's rows come first.

Random masks are addressed by it, so that they are the same however a step is cut into micro-batches, when a block is
run again in backward, and after a resume. It is declared around a forward and never read from a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """step: optimizer steps done before this one. row: rows of the step that lie in earlier micro-batches."""

    step: int
    row: int


_position: ContextVar[Position | None] = ContextVar("skimp_position", default=None)


@contextmanager
def declared_position(step: int, row: int) -> Iterator[None]:
    """Inside, forwards belong to this optimizer step and begin with this row of it."""
    token = _position.set(Position(step, row))
    try:
        yield
    finally:
        _position.reset(token)


def position() -> Position | None:
    """The declared position, None outside of any."""
    return _position.get()
