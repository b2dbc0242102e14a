"""Tensors whose rounding counts more than others': what is kept inside is kept with more bits, where kept tensors are
rounded at all. Attention says it of its own: an error of a score is one of its exponential."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_finer: ContextVar[bool] = ContextVar("skimp_finer", default=False)


@contextmanager
def finer() -> Iterator[None]:
    """Inside, what is kept for backward needs its bits."""
    token = _finer.set(True)
    try:
        yield
    finally:
        _finer.reset(token)


def needs_bits() -> bool:
    """Whether what is kept now does."""
    return _finer.get()
