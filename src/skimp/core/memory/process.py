"""The whole process: glibc's malloc policy, the measured baseline, resident memory now and at its peak.

glibc keeps freed memory by default: its mmap threshold climbs to 32 MiB with use, so a freed 12 MB activation stays
in the heap, and each thread may open an arena. skimp fixes one arena and one of these policies:

- "return": tensors above 256 KiB go back to the system when they are freed. Resident memory follows the tracked
  bytes within some 100 MB; every new activation is fresh pages, which the kernel must map and zero.
- "pool": as "return" for what is not a tensor; tensors come from skimp's own allocator (`kernels.native.pool`), which
  keeps freed blocks for the next ones within the plan's limit. Needs a C++ compiler once.
- "reuse": tensors below 4 MiB stay on the heap for the next one; the heap is trimmed twice a micro-batch, where a step
  is fullest. Faster (page faults were a sixth of a step of the 135M model at 512 tokens), for more resident memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
from dataclasses import dataclass
from typing import Literal

Policy = Literal["pool", "return", "reuse"]
THRESHOLDS: dict[Policy, int] = {"pool": 256 << 10, "return": 256 << 10, "reuse": 4 << 20}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_policy: Policy | None = None


def set_malloc_policy(policy: Policy = "return") -> bool:
    """Fix one arena and the thresholds of `policy`. True when set; False where the C library is not glibc.

    Call before the first large tensor, and again when a plan has chosen: it cannot move what is already on the heap.
    """
    global _policy
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, THRESHOLDS[policy]),
        (_M_TRIM_THRESHOLD, THRESHOLDS[policy]),
        # Every activation above the threshold is a mapping; the kernel's own limit is 65,530.
        (_M_MMAP_MAX, 60_000),
    )
    if all(libc.mallopt(key, value) == 1 for key, value in settings):
        _policy = policy
    return _policy == policy


def malloc_policy() -> Policy | None:
    """The policy in force in this process; None when the C library's own rules are."""
    return _policy


def trim() -> None:
    """Under "reuse", give whole free pages inside the heap back to the system.

    Called where a step is fullest and where a micro-batch ends.
    """
    if _policy == "reuse":
        ctypes.CDLL(None).malloc_trim(0)


def give_back() -> None:
    """Collect garbage and return free heap pages to the system, so that a baseline is not the past's peak."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(frozen=True)
class Resident:
    """Resident set size in bytes, now and at its highest; of it pages of files that are mapped.

    The kernel drops such pages when it needs room (a token file of many GB may be touched from end to end).
    """

    now: int
    peak: int
    files: int = 0


def resident() -> Resident:
    """Read this process's resident memory. The peak is VmHWM on Linux, ru_maxrss elsewhere."""
    if os.path.exists("/proc/self/status"):
        fields = {}
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                key, _, rest = line.partition(":")
                if key in ("VmRSS", "VmHWM", "RssFile"):
                    fields[key] = int(rest.split()[0]) * 1024
        return Resident(fields["VmRSS"], fields["VmHWM"], fields.get("RssFile", 0))
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
