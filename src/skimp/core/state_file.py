"""Optimizer states in a file that is mapped into memory: pages come when a parameter is updated and go after it.

One file without a name, one shared mapping. The kernel reads ahead what the next update needs and writes back what the
last one changed, beside the computation; what it keeps of the file in its cache is not the process's memory. It is no
checkpoint: those are written and read as ever, region by region, and a run that dies leaves nothing of it behind.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from skimp.core.away import ALIGNMENT, PAGE, Away, state_nbytes
from skimp.core.disk import allocate, open_unnamed

#: Linux 5.14: make a range present and writable at once, instead of a fault for every page.
_POPULATE_WRITE = 23


class StateFile(Away):
    """Regions in a mapped file.

    Args:
        folder: where; made when missing.

    Raises:
        RecipeError: the folder is in memory. OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file = open_unnamed(folder)
        self._closing = weakref.finalize(self, os.close, self._file)
        self._map: mmap.mmap | None = None
        self._spans: dict[str, tuple[int, int]] = {}
        self._used = self._base = 0
        self._last = ""
        self._next: dict[str, str] = {}

    def reserve(self, nbytes: int) -> None:
        super().reserve(nbytes)
        if nbytes:
            # A hole in the file would be filled at the first write, where a full disk is not an error but a signal.
            allocate(self._file, nbytes, self.folder)
            self._map = mmap.mmap(self._file, nbytes)
            self._base = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def tensors(self, name: str, size: int, specs: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[Tensor]:
        assert self._map is not None
        self._spans[name] = (self._used, size)
        offset, made = self._used, []
        for shape, dtype in specs:
            nbytes = state_nbytes(shape, dtype)
            flat = torch.frombuffer(self._map, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
            made.append(flat.view(tuple(shape)))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._used += size
        return made

    def bring(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Present at once; and the region that followed in the last step is read ahead."""
        with suppress(OSError):  # an older kernel brings the pages one by one
            self._advise(_POPULATE_WRITE, tensors)
        if self._last == name:
            return
        if self._last:
            self._next[self._last] = name
        self._last = name
        following = self._next.get(name)
        if following is not None and self._map is not None:
            self._map.madvise(mmap.MADV_WILLNEED, *self._spans[following])

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Out of the process; what changed is the file's, which the kernel writes in its own time."""
        self._advise(mmap.MADV_DONTNEED, tensors)

    def _advise(self, advice: int, tensors: Sequence[Tensor]) -> None:
        """On the pages that hold these; pages shared with a neighbour come and go with either."""
        for tensor in tensors:
            start = tensor.data_ptr() - self._base
            first = start // PAGE * PAGE
            if self._map is not None and tensor.numel():
                self._map.madvise(advice, first, start + tensor.nbytes - first)

    def close(self) -> None:
        super().close()
        self._map = None  # unmapped when the last tensor over it goes
        self._closing()
        self._file = -1  # its number may be another file's by now
