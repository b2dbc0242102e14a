"""Optimizer states in the host's memory, and the update beside them on the CPU: what a card holds is weights alone.

For each parameter the host keeps its states and a copy of it, both pinned. The gradient goes over, the CPU updates, the
parameter comes back: 4 bytes out and 4 in a parameter in float32, the least that any cut through the step allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from skimp.core.away import Away, state_nbytes
from skimp.core.exact import Place


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)


class SimulatedHostStates(Away):
    """Counts the host's bytes: states, a copy of each parameter, and one gradient."""

    place: ClassVar[Place] = "host"
    visits: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        #: bytes of the largest gradient that was seen.
        self.gradient = 0

    def make(
        self, name: str, specs: Sequence[tuple[Sequence[int], torch.dtype]], parameter: Tensor, at_once: int = 0
    ) -> list[Tensor] | None:
        again = self.holds(name)
        made = super().make(name, specs, parameter, at_once)
        if made is not None and not again:
            self._count(parameter)
        return made

    def _count(self, parameter: Tensor) -> None:
        self.nbytes += parameter.nbytes
        if parameter.nbytes > self.gradient:
            self.nbytes += parameter.nbytes - self.gradient
            self.gradient = parameter.nbytes


class HostStates(SimulatedHostStates):
    """Pinned states and copies.

    Args:
        empty: makes a host tensor that copies run from and to by themselves; pinned memory when not given.
    """

    def __init__(self, empty: Callable[[Sequence[int], torch.dtype], Tensor] = _pinned) -> None:
        super().__init__()
        self._empty = empty
        self._copies: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._gradient: Tensor | None = None

    def tensors(self, name: str, size: int, specs: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        return [self._empty(shape, dtype) for shape, dtype in specs]

    def beside(self, name: str, parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The host's copy of the parameter, made anew if others wrote to it, and the gradient beside it."""
        if name not in self._copies:
            self._copies[name] = self._empty(parameter.shape, parameter.dtype)
        copy = self._copies[name]
        if self._versions.get(name) != parameter._version:
            copy.copy_(parameter)
        size = state_nbytes(grad.shape, grad.dtype)
        if self._gradient is None or self._gradient.numel() < size:
            self._gradient = self._empty((size,), torch.uint8)
        there = self._gradient[:size].view(grad.dtype).view(grad.shape)
        there.copy_(grad)
        return copy, there

    def returned(self, name: str, parameter: Tensor) -> None:
        parameter.copy_(self._copies[name])
        self._versions[name] = parameter._version
