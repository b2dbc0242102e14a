"""Whose kernels a simulation stands for: its tensors lie on no device, so the device is declared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_target: ContextVar[str] = ContextVar("skimp_target", default="cpu")


@contextmanager
def target(device: str) -> Iterator[None]:
    """Declare whose kernels run inside: "cpu", "cuda", or "cuda:8.9" with the card's capability."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def target_device() -> str:
    """The device declared by `target`: "cpu" unless a simulation stands for another."""
    return _target.get()
