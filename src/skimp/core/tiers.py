"""Where tensors wait until they are needed again: the interface of a place outside the computing memory.

A tier holds *extents*, runs of bytes that are written once and read back whole. A step writes and drops the same sizes
in the same order as the step before, so a freed extent serves the next one of its size, and a tier grows to its
largest step and no further. The simulated tier counts the same extents and moves nothing: a plan knows the bytes of
every place from it.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from dataclasses import astuple, dataclass
from typing import ClassVar, Protocol

import torch

from skimp.core.exact import Place

#: Extents begin at multiples of this, a page: what direct I/O and read-ahead work in.
GRAIN = 4096


#: What a file system says when it has no more room (for this user, for this file).
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PlaceError(OSError):
    """A place outside the computing memory is full or fails, while a step needs it.

    A class of its own, so that whoever can do without the place knows it from a checkpoint that could not be written.

    Attributes:
        full: it has no more room; else it cannot be relied on at all.
    """

    @classmethod
    def of(cls, error: OSError, where: str) -> PlaceError:
        """The system's error, with the place's name."""
        return cls(error.errno, error.strerror, where)

    @property
    def full(self) -> bool:
        return self.errno in FULL


class Pending(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when what was copied may be used; raises what went wrong with it."""


@dataclass(frozen=True)
class Traffic:
    """What went to a place and came back, and what it cost.

    Attributes:
        out, back: bytes.
        moving: seconds that copies took, added up over the threads that make them.
        waited: seconds that the computation stood still for one.
    """

    out: int = 0
    back: int = 0
    moving: float = 0.0
    waited: float = 0.0

    @property
    def hidden(self) -> float | None:
        """Share of the copies' seconds that passed behind the computation; None where they were not timed."""
        return max(0.0, 1 - self.waited / self.moving) if self.moving else None

    def plus(self, other: Traffic, sign: int = 1) -> Traffic:
        """The sum of both; with -1 what came since `other`."""
        mine, theirs = astuple(self), astuple(other)
        return Traffic(*(a + sign * b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class Extent:
    """`nbytes` bytes at `offset` of a tier."""

    offset: int
    nbytes: int


class Done:
    """A copy that is over."""

    def wait(self) -> None:
        return


class Tier:
    """Extents and their counts; a real tier adds the copies.

    Attributes:
        place: "host" or "disk".
        used, peak: bytes held now and at most.
        size: bytes taken from the place, freed extents that wait for the next one included.
        written, fetched: bytes moved out and back since the start.
        out_seconds, back_seconds: what those copies took, each counted by the one thread that makes them.
        waited: seconds that whoever asked for them stood still until they were over.
    """

    place: ClassVar[Place]

    def __init__(self) -> None:
        self.used = self.peak = self.size = self.written = self.fetched = 0
        self.out_seconds = self.back_seconds = self.waited = 0.0
        self._free: defaultdict[int, list[Extent]] = defaultdict(list)

    def traffic(self) -> Traffic:
        """All that moved until now; seconds 0 where copies are not timed, as between a card and its host."""
        return Traffic(self.written, self.fetched, self.out_seconds + self.back_seconds, self.waited)

    def reserve(self, nbytes: int) -> Extent:
        """Room for `nbytes`.

        Raises:
            PlaceError: the place is full.
        """
        room = -(-nbytes // GRAIN) * GRAIN
        if self._free[room]:
            found = Extent(self._free[room].pop().offset, nbytes)
        else:
            try:
                self.grow(self.size + room)
            except OSError as error:
                raise PlaceError.of(error, error.filename or self.place) from error
            found = Extent(self.size, nbytes)
            self.size += room
        self.used += room
        self.peak = max(self.peak, self.used)
        return found

    def release(self, extent: Extent) -> None:
        """The extent's bytes are needed no more."""
        room = -(-extent.nbytes // GRAIN) * GRAIN
        self.used -= room
        self._free[room].append(extent)

    def store(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        """Begin to copy `extent.nbytes` bytes from `start` of `storage` out. The caller keeps the storage alive and
        unchanged until `wait` returns."""
        self.written += extent.nbytes
        return self.copy_out(extent, storage, start)

    def fetch(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        """Begin to fill `storage` with the extent. The caller keeps it alive until `wait` returns."""
        self.fetched += extent.nbytes
        return self.copy_in(extent, storage)

    def grow(self, size: int) -> None:
        """Take `size` bytes from the place in all."""
        raise NotImplementedError

    def copy_out(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        raise NotImplementedError

    def copy_in(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back to the place."""


class SimulatedDisk(Tier):
    """Counts what a disk would hold; for simulated tensors."""

    place: ClassVar[Place] = "disk"

    def grow(self, size: int) -> None:
        return

    def copy_out(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        return Done()

    def copy_in(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        return Done()


class SimulatedHost(SimulatedDisk):
    """Counts what host memory would hold; for simulated tensors."""

    place: ClassVar[Place] = "host"
