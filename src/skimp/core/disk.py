"""The disk tier: one file without a name, written and read by threads of its own.

The file is unlinked as soon as it is made, so nothing is left behind whatever ends the process. Room is allocated
before bytes are written: a full disk is seen where a step can still be given up. Every extent carries a checksum; a
byte that comes back changed ends the run instead of spoiling it. What was written stays in the system's page cache
while there is room for it, which is not the process's memory: the kernel takes it back when anything needs it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import time
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import torch

from skimp.core.errors import DamagedOffload, RecipeError
from skimp.core.exact import Place
from skimp.core.tiers import Extent, Pending, PlaceError, Tier

#: File systems that are memory: an offload to them saves nothing.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
#: The file grows by at least so much at once: asking for room is a call that waits for the file system.
GROWTH = 64 << 20


def open_unnamed(folder: Path) -> int:
    """A new file in `folder` that has no name any more: it lives as long as its descriptor.

    Raises:
        RecipeError: the folder lies in memory, not on a disk.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise RecipeError(
            f"exact.offload in {folder}",
            f"a file system of type {kind}",
            "its files are held in memory, which would be counted twice and saved not once",
            "exact.offload.folder=… on a disk",
        )
    descriptor, name = tempfile.mkstemp(prefix="skimp-", dir=folder)
    os.unlink(name)
    return descriptor


def file_system(folder: Path, table: Path = Path("/proc/self/mounts")) -> str:
    """The type of the file system that `folder` is on; empty where the system does not tell."""
    if not table.exists():
        return ""
    here, best, kind = folder.resolve(), -1, ""
    for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
        _, mounted, found = line.split()[:3]
        place = Path(mounted.replace("\\040", " "))
        if (place == here or place in here.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), found
    return kind


def allocate(descriptor: int, size: int, folder: Path) -> None:
    """Make the file `size` bytes long, with room for all of them.

    Raises:
        OSError: the disk is full; names the folder.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:  # macOS: a hole, filled when it is written
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error


class DiskTier(Tier):
    """Extents in a file.

    Args:
        folder: where; made when missing.

    Raises:
        RecipeError, OSError: as `open_unnamed`.
    """

    place: ClassVar[Place] = "disk"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file = open_unnamed(folder)
        #: also when a build breaks off and nobody closes the tier.
        self._closing = weakref.finalize(self, os.close, self._file)
        self._allocated = 0
        # One a direction: what is needed next never waits behind what is written, and an extent that is used again is
        # written after its last one.
        self._writers = ThreadPoolExecutor(1, "skimp-offload-out")
        self._readers = ThreadPoolExecutor(1, "skimp-offload-in")
        self._sums: dict[int, int] = {}

    def grow(self, size: int) -> None:
        if size > self._allocated:
            self._allocated = max(size, self._allocated + GROWTH)
            try:
                allocate(self._file, self._allocated, self.folder)
            except OSError:
                self._allocated = size
                allocate(self._file, size, self.folder)

    # Threads are given addresses, never tensors: the last reference must fall in the caller's thread, at a moment
    # that a simulation knows.

    def copy_out(self, extent: Extent, storage: torch.UntypedStorage, start: int) -> Pending:
        return _Job(self, self._writers.submit(self._write, extent, storage.data_ptr() + start))

    def copy_in(self, extent: Extent, storage: torch.UntypedStorage) -> Pending:
        return _Job(self, self._readers.submit(self._read, extent, storage.data_ptr()))

    def _write(self, extent: Extent, address: int) -> None:
        begin = time.perf_counter()
        data = _bytes_at(address, extent.nbytes)
        self._sums[extent.offset] = zlib.crc32(data)
        done = 0
        while done < extent.nbytes:
            try:
                done += os.pwrite(self._file, data[done:], extent.offset + done)
            except OSError as error:
                raise PlaceError.of(error, str(self.folder)) from error
        self.out_seconds += time.perf_counter() - begin

    def _read(self, extent: Extent, address: int) -> None:
        begin = time.perf_counter()
        data = _bytes_at(address, extent.nbytes)
        done = 0
        while done < extent.nbytes:
            try:
                got = os.preadv(self._file, [data[done:]], extent.offset + done)
            except OSError as error:
                raise PlaceError.of(error, str(self.folder)) from error
            if got == 0:
                raise PlaceError(errno.EIO, "the file ends early", str(self.folder))
            done += got
        if zlib.crc32(data) != self._sums[extent.offset]:
            raise DamagedOffload(
                f"{extent.nbytes:,} bytes as they were written to {self.folder}",
                "other bytes: their checksum differs",
                "the disk, its cable or its file system changed them",
                "go on from the last checkpoint with exact.offload.folder=… on another disk",
            )
        self.back_seconds += time.perf_counter() - begin

    def outcome(self, job: Future[None]) -> None:
        """Stand still until a thread's copy is over; raises what went wrong with it."""
        begin = time.perf_counter()
        try:
            job.result()
        finally:
            self.waited += time.perf_counter() - begin

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        self._closing()
        self._file = -1  # its number may be another file's by now


class _Job:
    """A thread's copy."""

    def __init__(self, tier: DiskTier, future: Future[None]) -> None:
        self._tier, self._future = tier, future

    def wait(self) -> None:
        self._tier.outcome(self._future)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
