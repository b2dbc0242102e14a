"""The whole process: glibc's malloc policy, the measured baseline, resident memory now and at its peak.

glibc keeps freed memory by default: its mmap threshold climbs to 32 MiB with use, so a freed 12 MB activation stays
in the heap, and each thread may open an arena. With one arena and fixed thresholds of 1 MiB every tensor above
1 MiB goes back to the system when it is freed, and resident memory follows the tracked bytes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
from dataclasses import dataclass

MMAP_THRESHOLD = TRIM_THRESHOLD = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_policy_set = False


def set_malloc_policy() -> bool:
    """One arena, mmap and trim thresholds of 1 MiB. True when set; False where the C library is not glibc.

    Call before the first large tensor: it cannot move what is already in the heap.
    """
    global _policy_set
    if _policy_set:
        return True
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD),
        # Every activation above 1 MiB is a mapping; glibc's default limit of 65,536 is also the kernel's.
        (_M_MMAP_MAX, 60_000),
    )
    _policy_set = all(libc.mallopt(key, value) == 1 for key, value in settings)
    return _policy_set


def malloc_policy_is_set() -> bool:
    """Whether `set_malloc_policy` took effect in this process."""
    return _policy_set


def give_back() -> None:
    """Collect garbage and return free heap pages to the system, so that a baseline is not the past's peak."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Resident:
    """Resident set size in bytes, now and at its highest."""

    now: int
    peak: int


def resident() -> Resident:
    """Read this process's resident memory. The peak is VmHWM on Linux, ru_maxrss elsewhere."""
    if os.path.exists("/proc/self/status"):
        fields = {}
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                key, _, rest = line.partition(":")
                if key in ("VmRSS", "VmHWM"):
                    fields[key] = int(rest.split()[0]) * 1024
        return Resident(fields["VmRSS"], fields["VmHWM"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak *= 1 if platform.system() == "Darwin" else 1024
    return Resident(peak, peak)


def reset_peak() -> bool:
    """Make the system's high-water mark start again from now (Linux: write 5 to clear_refs). False if refused."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as handle:
            handle.write("5")
    except OSError:
        return False
    return True
