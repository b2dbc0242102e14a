"""The host tier of a card: pinned memory, copied to and from on streams of its own.

Copies out and copies in run beside the computation, each direction on its own stream. A source is given up when the
computing stream has been told to wait for the copy, so whoever gets its memory next comes after it in that stream's
order; the host itself never waits. Pinned memory is slow to get and cannot be swapped, so it is kept and used again.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from skimp.core.exact import Place
from skimp.core.tiers import Extent, Pending, Tier


class Copy(Pending, Protocol):
    """A copy on a stream: `wait` makes the computing stream come after it, `finish` the caller."""

    def finish(self) -> None:
        """Return when the bytes are there."""


class Streams(Protocol):
    """The two copy streams beside the one that computes."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory that copies may run from and to by themselves; uint8."""

    def copy(self, target: Tensor, source: Tensor, way: str) -> Copy:
        """Copy on the stream "out" or "in", after all that was asked of the computing stream so far. `wait` makes the
        computing stream come after the copy."""


class CudaStreams:
    """CUDA's. One object for the life of a run: fresh streams each step would grow the allocator's pools."""

    def __init__(self) -> None:
        self._streams = {"out": torch.cuda.Stream(), "in": torch.cuda.Stream()}

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor, way: str) -> Copy:
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return _Event(stream.record_event())


class _Event:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class HostTier(Tier):
    """Extents in pinned memory.

    Args:
        streams: the device's; `CudaStreams` when not given.
    """

    place: ClassVar[Place] = "host"

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__()
        self._streams = streams or CudaStreams()
        self._memory: dict[int, Tensor] = {}
        #: the copy out of each extent: a copy in must come after it, on another stream.
        self._out: dict[int, Pending] = {}

    def grow(self, size: int) -> None:
        self._memory[self.size] = self._streams.pinned(size - self.size)

    def copy_out(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        source = bytes_of(storage, start, extent.nbytes)
        pending = self._streams.copy(self._memory[extent.offset][: extent.nbytes], source, "out")
        self._out[extent.offset] = pending
        return pending

    def copy_in(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        self._out.pop(extent.offset).wait()
        target = bytes_of(storage, 0, extent.nbytes)
        pending = self._streams.copy(target, self._memory[extent.offset][: extent.nbytes], "in")
        self._out[extent.offset] = pending  # the next step's copy out comes after it in the computing stream's order
        return pending

    def close(self) -> None:
        self._memory.clear()
        self._out.clear()


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> Tensor:
    """`nbytes` bytes of a storage from `start` on, as a tensor over it."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage, start, (nbytes,), (1,))
