"""Standard safetensors files, written and read one tensor at a time.

The library's own `save_file` first gathers all tensors; `load_file` maps the file, and every mapped page
that was touched counts as resident. Here a checkpoint of any size passes through at most one chunk of 4 MiB:
a 1.6 GB optimizer state costs 4 MiB to save, and nothing at all when it is a contiguous tensor in host
memory, whose bytes go to the kernel straight from where they lie. Reading goes straight into the tensors
that training uses, which keep the 64-byte alignment of ordinary allocations (training on misaligned maps
changes the results of matrix-vector kernels, and so resume would not be bit-equal).

Format: github.com/huggingface/safetensors, "Format": 8 bytes little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the bytes without holes.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import CheckpointError, DamagedCheckpoint, did_you_mean
from skimp.core.units import format_bytes
from skimp.run.durable import write_all
from skimp.run.faults import reach
from skimp.run.tensor_bytes import (
    ALIGNMENT,
    CHUNK,
    DTYPES,
    NAMES,
    Later,
    Spec,
    Staging,
    aligned_empty,
    in_place,
    pieces,
    raw_bytes,
    spec_of,
)


def layout(specs: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """The header bytes and the order of the tensors.

    Wider dtypes come first, else the order given: every tensor then starts at a multiple of its item size,
    which readers that map the file need. The header is padded with spaces so that the first tensor starts at
    a multiple of 64.
    """
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name in order:
        spec = specs[name]
        end = offset + spec.nbytes
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def write(
    path: Path, tensors: Mapping[str, Tensor | Later], metadata: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Write and flush a safetensors file; at most one chunk is copied at a time.

    Args:
        path: the file to make (or to overwrite); not atomic by itself, the caller renames.
        tensors: by name, in any dtype of `DTYPES`, any strides, any device.
        metadata: string pairs for the header.

    Returns:
        crc32 of each tensor's bytes by name, and of the header under "" (the one name a tensor cannot have
        here).

    Raises:
        CheckpointError: a tensor that has no plain bytes, or `Later.make` gave another dtype or shape than
            promised.
        OSError: the disk is full or failing; the caller knows what that means.
    """
    if sys.byteorder != "little":
        raise CheckpointError(
            f"writing {path}",
            "a big-endian machine",
            "safetensors is little-endian",
            "a little-endian machine",
        )
    specs = {name: spec_of(name, value) for name, value in tensors.items()}
    for name in specs:
        if name in ("", "__metadata__"):
            raise CheckpointError(f"saving a tensor named '{name}'", "a reserved name", instead="give it another name")
    header, order = layout(specs, metadata)
    sums = {"": zlib.crc32(header)}
    staging = Staging()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, header)
        for name in order:
            entry = tensors[name]
            tensor = entry.make() if isinstance(entry, Later) else entry
            if spec_of(name, tensor) != specs[name]:
                raise CheckpointError(
                    f"saving '{name}' as {specs[name]}", f"{spec_of(name, tensor)} when its turn came"
                )
            passed = entry.passed if isinstance(entry, Later) else None
            sums[name] = _write_tensor(descriptor, tensor.detach(), staging, passed)
        reach("before_fsync")
        os.fsync(descriptor)
        # Clean pages of a file nobody reads again soon: give them back, they would push out the data set's.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return sums


def _write_tensor(
    descriptor: int, tensor: Tensor, staging: Staging, passed: Callable[[Tensor], None] | None = None
) -> int:
    total = 0
    for piece in pieces(tensor):
        landing = piece if in_place(piece) else staging.like(piece).copy_(piece)
        data = raw_bytes(landing)
        reach("mid_tensor")
        write_all(descriptor, data)
        total = zlib.crc32(data, total)
        if passed is not None:
            passed(piece)
    return total


class SafetensorsReader:
    """A safetensors file opened for reading tensor by tensor; checked whole when opened, bytes checked when
    read.

    Raises:
        CheckpointError: the file is missing, cut short, too long, or its header is not a safetensors header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        self.metadata: dict[str, str] = {}
        self._start: dict[str, int] = {}
        self._staging = Staging()
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise CheckpointError(f"reading {path}", f"{error.strerror}") from error
        try:
            self.header_sum = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> int:
        size = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8) or b""
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise self._damaged(f"{size} bytes, too few for its header")
        text = bytearray(length)
        self._fill(memoryview(text), 8)
        try:
            header = json.loads(bytes(text))
            self.metadata = header.pop("__metadata__", {})
            ends = {0}
            for name, entry in header.items():
                spec = Spec(DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"]))
                begin, end = entry["data_offsets"]
                if end - begin != spec.nbytes or begin < 0:
                    raise self._damaged(f"'{name}' is {spec} but has {end - begin} bytes")
                self.specs[name] = spec
                self._start[name] = 8 + length + begin
                ends.add(end)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(f"a header that cannot be read ({type(error).__name__}: {error})") from error
        if 8 + length + max(ends) != size:
            raise self._damaged(f"{size} bytes where its header says {8 + length + max(ends)}")
        return zlib.crc32(text, zlib.crc32(prefix))

    def _damaged(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"reading {self.path}", found, "the file is damaged or not safetensors")

    def names(self) -> list[str]:
        """All tensors, in file order."""
        return list(self.specs)

    def spec(self, name: str) -> Spec:
        """dtype and shape of one tensor.

        Raises:
            CheckpointError: no such name, with the nearest ones.
        """
        if name not in self.specs:
            raise CheckpointError(f"'{name}' in {self.path}", "no such tensor", instead=did_you_mean(name, self.specs))
        return self.specs[name]

    def read(self, name: str, checksum: int | None = None) -> Tensor:
        """A new host tensor, 64-byte aligned; the rest as `read_into`."""
        spec = self.spec(name)
        tensor = aligned_empty(spec.shape, spec.dtype)
        self.read_into(name, tensor, checksum)
        return tensor

    def read_into(
        self,
        name: str,
        tensor: Tensor,
        checksum: int | None = None,
        passed: Callable[[Tensor], None] | None = None,
        cast: bool = False,
    ) -> None:
        """Read straight into `tensor` (any strides, any device), which must have the saved shape, and dtype unless
        `cast`. At most a chunk of it is in memory twice.

        Args:
            name: as saved.
            tensor: filled in place, outside autograd; its version counter moves on, as for any in-place
                write.
            checksum: crc32 of the bytes as noted when saving; None reads unchecked.
            passed: told of every piece that has been filled.
            cast: to the dtype of `tensor`, rounded as `Tensor.copy_` rounds.

        Raises:
            CheckpointError: no such name, another dtype or shape, a short file, or bytes that changed on
                disk.
        """
        spec, target = self.spec(name), tensor.detach()
        asked = spec_of(name, target)
        if asked.shape != spec.shape or (asked.dtype != spec.dtype and not cast):
            raise CheckpointError(
                f"reading '{name}' into {spec_of(name, target)}",
                f"{spec} ({format_bytes(spec.nbytes)}) in {self.path}",
                "a checkpoint is read as it was written; nothing is cast or cut in silence",
                "build the run with the recipe the checkpoint was written with",
            )
        offset, total = self._start[name], 0
        # A piece fits the staging buffer as it lies in the file.
        limit = CHUNK * asked.dtype.itemsize // max(asked.dtype.itemsize, spec.dtype.itemsize)
        for piece in pieces(target, limit):
            straight = in_place(piece) and asked.dtype == spec.dtype
            landing = piece if straight else self._staging.like(piece, spec.dtype)
            data = raw_bytes(landing)
            self._fill(data, offset)
            total = zlib.crc32(data, total)
            offset += len(data)
            if not straight:
                piece.copy_(landing)
            if passed is not None:
                passed(piece)
        torch.autograd.graph.increment_version(tensor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self._start[name], spec.nbytes, os.POSIX_FADV_DONTNEED)
        if checksum is not None:
            self._compare(name, total, checksum)

    def verify(self, name: str, checksum: int) -> None:
        """Read one tensor's bytes, a chunk at a time, and hold them against their checksum. Nothing is kept.

        Raises:
            DamagedCheckpoint: they changed on disk.
        """
        buffer = memoryview(bytearray(CHUNK))
        offset, left, total = self._start[name], self.specs[name].nbytes, 0
        while left:
            part = buffer[: min(left, CHUNK)]
            self._fill(part, offset)
            total = zlib.crc32(part, total)
            offset, left = offset + len(part), left - len(part)
        self._compare(name, total, checksum)

    def _compare(self, name: str, found: int, written: int) -> None:
        if found != written:
            raise DamagedCheckpoint(
                f"reading '{name}' from {self.path}",
                f"crc32 {found:08x} where {written:08x} was written",
                "its bytes changed on disk",
                "go on from an older checkpoint, and check the disk",
            )

    def _fill(self, data: memoryview, offset: int) -> None:
        self._file.seek(offset)
        while len(data):
            count = self._file.readinto(data)
            if not count:
                raise self._damaged(f"the end of the file {len(data)} bytes early")
            data = data[count:]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
