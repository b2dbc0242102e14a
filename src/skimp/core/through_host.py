"""The disk tier of a card: bytes pass through pinned host memory, on streams of their own and in threads.

A source is given up when it has been copied to the host; the disk follows in its own time. What comes back is read into
host memory ahead of need and goes to the card when it is waited for. Pinned buffers are kept by size and used again.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from skimp.core.disk import DiskTier
from skimp.core.pinned import CudaStreams, Streams, bytes_of
from skimp.core.tiers import Extent, Pending


class DiskThroughHost(DiskTier):
    """Extents in a file, for tensors of a card.

    Args:
        folder: as `DiskTier`.
        streams: the device's; `CudaStreams` when not given.
    """

    def __init__(self, folder: Path, streams: Streams | None = None) -> None:
        super().__init__(folder)
        self._streams = streams or CudaStreams()
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._written: dict[int, Future[None]] = {}

    def copy_out(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        buffer = self._buffer(extent.nbytes)
        pending = self._streams.copy(buffer, bytes_of(storage, start, extent.nbytes), "out")

        def write() -> None:
            pending.finish()
            self._write(extent, buffer.data_ptr())
            self._idle[extent.nbytes].append(buffer)

        self._written[extent.offset] = self._writers.submit(write)
        return pending

    def copy_in(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        written, buffer = self._written[extent.offset], self._buffer(extent.nbytes)

        def read() -> None:
            written.result()
            self._read(extent, buffer.data_ptr())

        return _Back(self, self._readers.submit(read), buffer, bytes_of(storage, 0, extent.nbytes))

    def _buffer(self, nbytes: int) -> Tensor:
        idle = self._idle[nbytes]
        return idle.pop() if idle else self._streams.pinned(nbytes)

    def close(self) -> None:
        super().close()
        self._idle.clear()
        self._written.clear()


class _Back:
    """Read into a buffer; copied on to the card when it is waited for."""

    def __init__(self, tier: DiskThroughHost, job: Future[None], buffer: Tensor, target: Tensor) -> None:
        self._tier, self._job, self._buffer, self._target = tier, job, buffer, target

    def wait(self) -> None:
        self._tier.outcome(self._job)
        pending = self._tier._streams.copy(self._target, self._buffer, "in")
        pending.wait()
        pending.finish()  # the buffer is someone else's next
        self._tier._idle[self._buffer.numel()].append(self._buffer)
