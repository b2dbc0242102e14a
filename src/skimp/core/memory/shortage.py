"""Which exceptions mean that an allocator had no memory left, and how much it was asked for.

torch has no common class for them: a card raises `torch.OutOfMemoryError`, the CPU allocator a plain RuntimeError,
C++ containers `std::bad_alloc` inside one, Python and numpy MemoryError, the system OSError with ENOMEM.
"""

from __future__ import annotations

import errno
import re

import torch

from skimp.core.units import UNITS

#: What a plain RuntimeError says when it is about memory: CPU (Linux, Windows), C++, Apple, libraries on a card.
PHRASES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_ASKED = re.compile(r"(?:tried to|unable to) allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B)\b", re.IGNORECASE)


def refused(error: BaseException) -> int | None:
    """Bytes that an allocator refused, 0 where it does not say how many; None when this is another error."""
    if isinstance(error, OSError):
        return 0 if error.errno == errno.ENOMEM else None
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if not known and not (isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in PHRASES)):
        return None
    asked = _ASKED.search(str(error))
    if asked is None:
        return 0
    number, unit = asked.groups()
    return int(float(number) * (1 if unit == "bytes" else UNITS[unit.upper()]))
