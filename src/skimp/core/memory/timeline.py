"""Memory over a step, thinned while it is recorded: a step of 100,000 operators stays some thousand points.

A point stands for `stride` operators and is the fullest moment among them, so no peak is ever lost. When there are
`limit` points, neighbours of one phase become one and the stride doubles. At 2,000 points of 16 numbers of 8 bytes
the recorder holds 0.26 MB, however long the step is.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIMIT = 2000
#: Columns before the bytes of the categories.
OPERATOR, NANOSECONDS, RESIDENT, PHASE, OWNER, NAME, TOTAL, FIRST = range(8)


class Timeline:
    """The fullest moment of each few operators.

    Args:
        categories: names of what the bytes are split into; the split's order.
        limit: most points kept; at least half as many are once there was that much to record.
        resident: bytes the system counts for the process now, asked once a point; None leaves the column at 0.
        clock: nanoseconds, monotonic.
    """

    def __init__(
        self,
        categories: Sequence[str],
        limit: int = LIMIT,
        resident: Callable[[], int] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.categories = tuple(categories)
        self.limit = limit
        self.stride = 1
        #: total bytes of the last event, so that a caller can skip what changed nothing.
        self.last = -1
        self._width = FIRST + len(self.categories)
        self._rows = array("q")
        self._now: list[int] | None = None
        self._phases: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._resident, self._clock = resident, clock
        self._begin = clock()

    def __len__(self) -> int:
        return len(self._rows) // self._width + (self._now is not None)

    def add(self, operator: int, shares: Mapping[str, int], total: int, phase: str, owner: str, name: str = "") -> None:
        """One event.

        Args:
            operator: the running number of the operator; rises.
            shares: bytes by category, without what the operator needs inside.
            total: all bytes; what it has above the sum of `shares` is counted as workspace.
            phase, owner: where.
            name: the operator's.
        """
        self.last = total
        now = self._now
        index = self._phases.setdefault(phase, len(self._phases))
        if now is not None and (now[OPERATOR] // self.stride != operator // self.stride or now[PHASE] != index):
            self._close()
            now = None
        if now is not None and total <= now[TOTAL]:
            return
        resident = now[RESIDENT] if now is not None else self._resident() if self._resident is not None else 0
        row = [operator, self._clock() - self._begin, resident, index, 0, 0, total]
        row[OWNER] = self._owners.setdefault(owner, len(self._owners))
        row[NAME] = self._names.setdefault(name, len(self._names))
        split = [shares[name] for name in self.categories]
        split[self.categories.index("workspace")] += total - sum(split)
        self._now = row + split

    def _close(self) -> None:
        if self._now is None:
            return
        self._rows.extend(self._now)
        self._now = None
        if len(self) >= self.limit:
            self._merge(across=False)
            if len(self) > 3 * self.limit // 4:
                self._merge(across=True)  # a step that changes phase at every operator

    def _merge(self, across: bool) -> None:
        """Pairs of neighbours become their fuller one."""
        self.stride *= 2
        width, old, new = self._width, self._rows, array("q")
        place = 0
        while place < len(old):
            one, other = old[place : place + width], old[place + width : place + 2 * width]
            if other and (across or one[PHASE] == other[PHASE]):
                kept = one if one[TOTAL] >= other[TOTAL] else other
                kept[RESIDENT] = max(one[RESIDENT], other[RESIDENT])
                new.extend(kept)
                place += 2 * width
            else:
                new.extend(one)
                place += width
        self._rows = new

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, one list per column; `seconds` since recording began, `bytes` by category."""
        self._close()
        columns = [list(self._rows[c :: self._width]) for c in range(self._width)]
        return {
            "stride": self.stride,
            "operator": columns[OPERATOR],
            "seconds": [round(n * 1e-9, 4) for n in columns[NANOSECONDS]],
            "resident": columns[RESIDENT] if self._resident is not None else None,
            "phases": list(self._phases),
            "phase": columns[PHASE],
            "owners": list(self._owners),
            "owner": columns[OWNER],
            "names": list(self._names),
            "name": columns[NAME],
            "bytes": {name: columns[FIRST + i] for i, name in enumerate(self.categories)},
        }


def resident_reader() -> Callable[[], int] | None:
    """A reader of this process's resident bytes that costs microseconds, for use at every point; None off Linux."""
    if not os.path.exists("/proc/self/statm"):
        return None
    page = os.sysconf("SC_PAGE_SIZE")

    def read() -> int:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(128).split()[1]) * page

    return read
