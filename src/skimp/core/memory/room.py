"""How much memory is left before the kernel would end a process: on the machine, and in its control groups.

Read from /proc and /sys at every call, in some tens of microseconds, so that it can be asked while training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Control groups write "no limit" as a number near 2**63; nothing this large is a machine.
NO_LIMIT = 2**60
#: Room below which a process must stop allocating: a hundredth of what there is, between these two. It lies below what
#: a plan leaves free on purpose (60 MB and 2 % of the tensors), so that a run which keeps to its plan never meets it.
FLOOR_SHARE, FLOOR_LEAST, FLOOR_MOST = 0.01, 32_000_000, 128_000_000
ROOT = Path("/")


@dataclass(frozen=True)
class Group:
    """A control group with a limit: where its figures are, and which pages count although the kernel can drop them."""

    folder: Path
    limits: Sequence[str]
    usage: str
    inactive: str
    active: str

    def bound(self) -> int | None:
        """Bytes at which the kernel reclaims by force (memory.high) or kills; None for no limit."""
        found = [value for name in self.limits if (value := number(self.folder / name)) is not None]
        return min((value for value in found if value < NO_LIMIT), default=None)

    def charged(self) -> int:
        """Bytes charged to the group, pages of files it has read or written included."""
        return number(self.folder / self.usage) or 0

    def cached(self, *kinds: str) -> int:
        """Pages of files among them; not those of shared memory, which have nowhere to go."""
        return sum(field(self.folder / "memory.stat", kind) or 0 for kind in kinds or (self.inactive, self.active))


def groups(root: Path = ROOT) -> Iterator[Group]:
    """The control groups of this process and those above them that have a limit."""
    limits: Sequence[str]
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        version, controllers, path = line.split(":", 2)
        if version == "0" and not controllers:
            base, limits, usage = root / "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current"
            caches = ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            base, limits, usage = (root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes")
            caches = ("total_inactive_file", "total_active_file")
        else:
            continue
        folder = base / path.strip("/")
        # Inside a container the path may be the host's and not exist here: the mount's own root is then this group.
        for here in [folder, *folder.parents]:
            group = Group(here, limits, usage, *caches)
            if group.bound() is not None:
                yield group
            if here == base:
                break


def available(root: Path = ROOT) -> int | None:
    """Bytes the machine can give out without swapping; None where the system does not tell."""
    found = field(root / "proc/meminfo", "MemAvailable:")
    return None if found is None else found * 1024


@dataclass(frozen=True)
class Left:
    """Bytes left, the floor they must not fall below, and where the figure is from."""

    bytes: int
    floor: int
    where: str


class Room:
    """What is left for this process, again and again. The control groups are found once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.groups = list(groups(root))

    def left(self) -> Left | None:
        """The narrowest place: the machine (free swap counts, the kernel uses it before it kills) or a group.

        None where the system tells of neither.
        """
        found = []
        total, free, swap = fields(self.root / "proc/meminfo", "MemTotal:", "MemAvailable:", "SwapFree:")
        if total is not None and free is not None:
            found.append(Left(1024 * (free + (swap or 0)), floor(1024 * total), "on this machine"))
        for group in self.groups:
            bound = group.bound()
            if bound is not None:
                room, least = bound - group.charged(), floor(bound)
                if room < 8 * least:  # far from it, the pages that could be dropped need no counting
                    room += group.cached()
                found.append(Left(room, least, f"in the control group {group.folder}"))
        return min(found, key=lambda one: one.bytes - one.floor, default=None)


def floor(total: int) -> int:
    """The floor of a place with `total` bytes."""
    return min(FLOOR_MOST, max(FLOOR_LEAST, int(total * FLOOR_SHARE)))


def fields(path: Path, *keys: str) -> list[int | None]:
    """The numbers behind `keys` in a file of "key number" lines; None for those that are not there."""
    found: dict[str, int] = {}
    for line in (text(path) or "").splitlines():
        parts = line.split(maxsplit=2)
        if parts and parts[0] in keys:
            found[parts[0]] = int(parts[1])
            if len(found) == len(keys):
                break
    return [found.get(key) for key in keys]


def field(path: Path, key: str) -> int | None:
    """The number behind one key."""
    return fields(path, key)[0]


def number(path: Path) -> int | None:
    """A file that holds one number; "max" is none."""
    found = (text(path) or "").strip()
    return int(found) if found.isdigit() else None


def text(path: Path) -> str | None:
    """The file's text; None where it is absent on this system, or not ours to read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None
