"""Where in a run a forward is: which optimizer step, and which of the step's rows come first.

Random masks are addressed by it, so that they are the same however a step is cut into micro-batches, when a block is
run again in backward, and after a resume. It is declared around a forward and never read from a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Position:
    """step: optimizer steps done before this one. row: rows of the step that lie in earlier micro-batches.
    tokens: of a row, where only some tokens are at work, given flat; None: whole rows are. token: the first of those,
    counted from the micro-batch's first. recorded: gradients will be asked of this forward, though it runs without a
    graph now and again with one in backward."""

    step: int
    row: int
    tokens: int | None = None
    token: int = 0
    recorded: bool = False


_position: ContextVar[Position | None] = ContextVar("skimp_position", default=None)


@contextmanager
def declared_position(step: int, row: int) -> Iterator[None]:
    """Inside, forwards belong to this optimizer step and begin with this row of it."""
    token = _position.set(Position(step, row))
    try:
        yield
    finally:
        _position.reset(token)


@contextmanager
def declared_tokens(place: Position | None, tokens: int, first: int, recorded: bool) -> Iterator[None]:
    """Inside, forwards at `place` are over flat tokens from `first` on, of rows of `tokens`; None declares nothing."""
    here = None if place is None else replace(place, tokens=tokens, token=first, recorded=recorded)
    token = _position.set(here)
    try:
        yield
    finally:
        _position.reset(token)


def position() -> Position | None:
    """The declared position, None outside of any."""
    return _position.get()


def recording() -> bool:
    """Whether gradients will be asked of the forward at work: masks of training are for those."""
    here = _position.get()
    return torch.is_grad_enabled() or (here is not None and here.recorded)
