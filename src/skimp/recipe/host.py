"""How much main memory this process may have: what the machine has free, or what its control group allows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from skimp.core.errors import SkimpError
from skimp.core.units import format_bytes

#: Control groups write "no limit" as a number near 2**63; nothing this large is a machine.
NO_LIMIT = 2**60


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
    available = _meminfo(root)
    if available is None:
        total = _physical()
        if total is None:
            raise SkimpError(
                "the memory this process may have",
                f"platform {sys.platform} does not tell",
                instead="say it in the recipe: budget: {host: 16GB}",
            )
        return HostBudget(total, f"physical memory, {format_bytes(total)}; what is free of it is not known here")
    best = HostBudget(
        available + own, f"memory available on this machine, {format_bytes(available)} beside this process"
    )
    for limit, used, where in _limits(root):
        room = limit - max(0, used - own)
        if room < best.bytes:
            best = HostBudget(
                max(room, 0),
                f"control group limit {format_bytes(limit)} ({where}), others in it hold "
                f"{format_bytes(max(0, used - own))}",
            )
    return best


def _meminfo(root: Path) -> int | None:
    text = _text(root / "proc/meminfo")
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _own_bytes(root: Path) -> int:
    for line in (_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _limits(root: Path) -> Iterator[tuple[int, int, str]]:
    """(limit, bytes used that cannot be dropped, file) of this process's control group and those above it."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cache = "total_inactive_file"
        else:
            continue
        folder = base / path.strip("/")
        # Inside a container the path may be the host's and not exist here: the mount's own root is then
        # this group.
        for here in [folder, *folder.parents]:
            bound = _int(here / limit)
            if bound is not None and bound < NO_LIMIT:
                used = (_int(here / usage) or 0) - _stat(here / "memory.stat", cache)
                yield bound, max(used, 0), f"{here / limit}"
            if here == base:
                break


def _stat(path: Path, key: str) -> int:
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _int(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # absent on this system, or not ours to read: the other sources decide
        return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
