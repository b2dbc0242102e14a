"""How much main memory this process may have: what the machine has free, or what its control group allows."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from skimp.core.errors import SkimpError
from skimp.core.memory.room import available, field, groups
from skimp.core.units import format_bytes


@dataclass(frozen=True)
class HostBudget:
    """Bytes the whole process may take, what it has already included, and what set the figure."""

    bytes: int
    why: str


def host_budget(root: Path = Path("/")) -> HostBudget:
    """min(control-group limit, available memory), for the whole process.

    What the process already holds is added to both, since a budget counts it again; what others in the same
    control group hold (page cache that can be dropped aside) is taken off its limit.

    Args:
        root: where proc and sys are mounted; another folder in tests.

    Raises:
        SkimpError: the system tells neither; give `budget: {host: …}`.
    """
    own = _own_bytes(root)
    free = available(root)
    if free is None:
        total = _physical()
        if total is None:
            raise SkimpError(
                "the memory this process may have",
                f"platform {sys.platform} does not tell",
                instead="say it in the recipe: budget: {host: 16GB}",
            )
        return HostBudget(total, f"physical memory, {format_bytes(total)}; what is free of it is not known here")
    best = HostBudget(free + own, f"memory available on this machine, {format_bytes(free)} beside this process")
    for group in groups(root):
        limit = group.bound()
        if limit is None:
            continue
        used = max(0, group.charged() - group.cached(group.inactive))
        room = limit - max(0, used - own)
        if room < best.bytes:
            best = HostBudget(
                max(room, 0),
                f"control group limit {format_bytes(limit)} ({group.folder / group.limits[0]}), others in it hold "
                f"{format_bytes(max(0, used - own))}",
            )
    return best


def _own_bytes(root: Path) -> int:
    return (field(root / "proc/self/status", "VmRSS:") or 0) * 1024


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
