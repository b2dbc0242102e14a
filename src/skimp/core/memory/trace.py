"""Every allocation and release of a step, in order: what an allocator's model is fed with.

A `Tracker` that is given a trace writes into it; without one nothing is recorded. 24 bytes an event.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from skimp.core.errors import OutOfMemory
from skimp.core.memory.cuda_allocator import CudaAllocator
from skimp.core.memory.cuda_blocks import Block
from skimp.core.memory.cuda_settings import DEFAULTS, AllocatorSettings

#: Operators that make a matrix library open a handle, which takes its workspace once.
PRODUCTS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmm_", "aten::addbmm"})
Place = tuple[str, str]


@dataclass(frozen=True)
class Reservation:
    """Peaks of a replayed trace, in bytes.

    Attributes:
        requested: what tensors and workspaces asked for.
        allocated: the blocks they got: rounded up, and with the rest that was not worth splitting off.
        reserved: what the device had to give for it.
        retries: how often cached segments had to be given back first; each waits for the device.
        fits: no request failed.
        place: (phase, owner) when the most was reserved, or at the request that failed.
        settings: the allocator's, in words.
    """

    requested: int
    allocated: int
    reserved: int
    retries: int
    fits: bool
    place: Place
    settings: str

    @property
    def fragmentation(self) -> int:
        """Reserved bytes that no tensor could use at the peak."""
        return self.reserved - self.allocated

    def as_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {
            "requested_bytes": self.requested,
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "fragmentation_bytes": self.fragmentation,
            "retries": self.retries,
            "fits": self.fits,
            "where": ", ".join(part for part in self.place if part),
            "settings": self.settings,
        }


@dataclass
class Trace:
    """Allocations (positive sizes) and releases (-1) by key; a key may come again once it was released.

    Attributes:
        workspace: bytes a matrix library's handle takes, once in the thread that runs forward and once in autograd's.
        places: where (phase, owner) a stretch of events begins.
    """

    workspace: int = 0
    keys: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    starts: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    #: The event a step begins at; what is before it happens once.
    step: int = 0
    closed: bool = False
    _handles: set[bool] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.keys)

    def begin_step(self) -> None:
        """The events from here on come again with every step."""
        self.step = len(self.keys)

    def close(self) -> None:
        """What comes and goes from here on is the simulation's own end."""
        self.closed = True

    def malloc(self, key: int, size: int, phase: str = "", owner: str = "") -> None:
        """A storage of `size` bytes; empty ones get no block."""
        if size and not self.closed:
            self._at(phase, owner)
            self.keys.append(key)
            self.sizes.append(size)

    def free(self, key: int, size: int, phase: str = "", owner: str = "") -> None:
        """Its end."""
        if size and not self.closed:
            self._at(phase, owner)
            self.keys.append(key)
            self.sizes.append(-1)

    def called(self, operator: str, inside: int, phase: str, owner: str) -> None:
        """An operator returned that took `inside` bytes meanwhile."""
        if self.workspace and operator in PRODUCTS and (phase == "backward") not in self._handles:
            self._handles.add(phase == "backward")
            self.malloc(-1 - len(self._handles), self.workspace, phase, owner)
        if inside:
            self.malloc(-1, inside, phase, owner)
            self.free(-1, inside, phase, owner)

    def events(self, first: int = 0) -> Iterator[tuple[int, int]]:
        """(key, size or -1) in order."""
        return zip(self.keys[first:], self.sizes[first:], strict=True)

    def place(self, index: int) -> Place:
        """Where event `index` was."""
        at = bisect_right(self.starts, index) - 1
        return self.places[at] if at >= 0 else ("", "")

    def _at(self, phase: str, owner: str) -> None:
        if not self.places or self.places[-1] != (phase, owner):
            self.starts.append(len(self.keys))
            self.places.append((phase, owner))


def replay(
    trace: Trace, settings: AllocatorSettings = DEFAULTS, capacity: int | None = None, steps: int = 1
) -> Reservation:
    """Feed a trace to the CUDA allocator's model.

    Args:
        settings: the allocator's.
        capacity: bytes the device can give; None for no end.
        steps: how often the step is replayed: the second begins among the first one's pieces. Tensors that a step made
            and left are the next one's.
    """
    allocator = CudaAllocator(settings, capacity)
    malloc, free, reserved = allocator.malloc, allocator.free, allocator.reserved
    held: dict[int, Block] = {}
    most = at = index = 0
    fits = True
    try:
        for step in range(steps):
            first = trace.step if step else 0
            for index, (key, size) in enumerate(trace.events(first), first):
                if size < 0:
                    free(held.pop(key))
                elif key not in held:
                    held[key] = malloc(size)
                    if reserved.peak > most:
                        most, at = reserved.peak, index
    except OutOfMemory:
        fits, at = False, index
    return Reservation(
        allocator.requested.peak,
        allocator.allocated.peak,
        allocator.reserved.peak,
        allocator.retries,
        fits,
        trace.place(at),
        settings.describe(),
    )
