"""A test facility: named points inside a save at which a test may stop, fail or kill this process.

Crash safety cannot be shown by argument alone, so the code that writes checkpoints calls `reach(point)`
wherever a death would be most awkward, and the tests die at every one of them. Nothing happens in ordinary
runs.

Two ways to switch it on:
- `faults.fault_points = callable` in the same process; it may raise (a simulated disk error) or kill.
- `SKIMP_FAULT="point:n"` in the environment: this process kills itself with SIGKILL at the n-th time (from
1) that
  it reaches `point`. SIGKILL, because it is what the kernel's out-of-memory killer sends and cannot be
  tidied up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from skimp.core.errors import SkimpError, did_you_mean

#: In the order in which a save reaches them. "mid_tensor" comes before every chunk written of a tensor.
POINTS = (
    "before_write",
    "mid_tensor",
    "after_file",
    "before_fsync",
    "before_rename",
    "after_rename",
    "before_mark",
    "mid_mark",
    "after_mark",
    "prune",
)

fault_points: Callable[[str], None] | None = None
_hits = 0


def reach(point: str) -> None:
    """Say that `point` (one of `POINTS`) has been reached.

    Raises:
        SkimpError: SKIMP_FAULT is set but is not "point:n" with a known point and n >= 1.
    """
    if fault_points is not None:
        fault_points(point)
    asked = os.environ.get("SKIMP_FAULT")
    if asked:
        _kill_if_due(asked, point)


def _kill_if_due(asked: str, point: str) -> None:
    global _hits
    wanted, _, count = asked.partition(":")
    if wanted not in POINTS or not count.isdecimal() or int(count) < 1:
        raise SkimpError("SKIMP_FAULT: 'point:n'", f"{asked!r}", "it is a test facility", did_you_mean(wanted, POINTS))
    if point == wanted:
        _hits += 1
        if _hits == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
