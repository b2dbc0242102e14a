"""Optimizer states that live elsewhere between updates: what a rule asks of such a place.

A rule updates one parameter at a time, so the states of all others may wait outside the computing memory. A *region*
holds the states of one parameter under its name. Opening it makes the tensors usable at ordinary cost; closing it gives
the memory back and keeps the numbers. The tensors are the same objects throughout, so whoever names, saves, loads or
inspects the state of a rule sees ordinary tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from skimp.core.errors import EffectError
from skimp.core.exact import Place
from skimp.core.memory.tracker import away, here

#: Regions below this stay in memory: they would not fill a few pages.
SMALL = 2 * 4096
#: Tensors in a region begin at multiples of this.
ALIGNMENT = 64
#: The machine's page: advice on part of one is refused (4 KiB mostly, 16 or 64 KiB on some ARM machines).
PAGE = mmap.PAGESIZE


def region_bytes(specs: Sequence[tuple[Sequence[int], torch.dtype]]) -> int:
    """Bytes of a region for tensors of these shapes and dtypes, in whole pages; 0 where they stay in memory."""
    total = 0
    for shape, dtype in specs:
        total += -(-state_nbytes(shape, dtype) // ALIGNMENT) * ALIGNMENT
    return 0 if total < SMALL else -(-total // PAGE) * PAGE


def state_nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one tensor."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return size


class Away:
    """Regions of states by parameter name. This form counts and moves nothing: for simulated tensors.

    Attributes:
        place: "host" or "disk".
        nbytes: bytes taken there.
        largest: most bytes that are in memory while a parameter is updated.
        opened: how often a region was opened.
    """

    place: ClassVar[Place] = "disk"
    #: whether an open region is in the memory that computes; else the update is made where the region is.
    visits: ClassVar[bool] = True

    def __init__(self) -> None:
        self.nbytes = self.largest = self.opened = 0
        self._regions: dict[str, list[Tensor]] = {}

    def reserve(self, nbytes: int) -> None:
        """Take room for all regions, before the first of them is made.

        Raises:
            OSError: the place is full.
        """
        self.nbytes = nbytes

    def make(
        self, name: str, specs: Sequence[tuple[Sequence[int], torch.dtype]], parameter: Tensor, at_once: int = 0
    ) -> list[Tensor] | None:
        """Zeros of these shapes and dtypes, the state of `parameter`, in a region of their own.

        None where they are too small to move. `at_once`: bytes of them that are opened together; 0 for all.
        """
        size = region_bytes(specs)
        if not size:
            return None
        self.largest = max(self.largest, at_once or size)
        if name in self._regions:  # given back once, as moments of layers that rest are
            with self.open(name):
                for tensor in self._regions[name]:
                    tensor.zero_()
            return self._regions[name]
        self._regions[name] = self.tensors(name, size, specs)
        away(self._regions[name])
        return self._regions[name]

    def tensors(self, name: str, size: int, specs: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        return [torch.zeros(tuple(shape), dtype=dtype) for shape, dtype in specs]

    def holds(self, name: str) -> bool:
        """Whether the states of this parameter live here."""
        return name in self._regions

    @contextmanager
    def open(self, name: str, parts: Sequence[Tensor] | None = None) -> Iterator[None]:
        """The states of one parameter in memory for as long as the context lasts; nothing for those that never left.

        Args:
            parts: views of them, to open no more than those show.
        """
        if name not in self._regions:
            yield
            return
        tensors = self._regions[name] if parts is None else parts
        self.opened += 1
        if self.visits:
            here(tensors, "optimizer")
        self.bring(name, tensors)
        try:
            yield
        finally:
            self.give_back(tensors)
            away(self._regions[name])

    def bring(self, name: str, tensors: Sequence[Tensor]) -> None:
        return

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """These were read or written, and go back."""

    def beside(self, name: str, parameter: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Parameter and gradient where the states are: the same tensors, unless they live on another device."""
        return parameter, grad

    def returned(self, name: str, parameter: Tensor) -> None:
        """The parameter beside the states has moved: so must the one that computes."""

    def assert_effect(self) -> None:
        """States live here, and were opened for updates.

        Raises:
            EffectError: nothing does, or nothing was.
        """
        if not self._regions or not self.opened:
            raise EffectError(
                f"optimizer states on {self.place}",
                f"{len(self._regions)} parameters have theirs there, opened {self.opened} times",
                "all of them are in memory",
                "train parameters of more than a thousand numbers each",
            )

    def close(self) -> None:
        """Give the place back. The tensors must not be used any more."""
        self._regions.clear()
