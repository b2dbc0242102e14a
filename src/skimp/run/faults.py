"""A test facility: named points inside a save and a step at which a test may stop, fail or kill this process.

Crash safety cannot be shown by argument alone, so the code that writes checkpoints calls `reach(point)`
wherever a death would be most awkward, and the tests die at every one of them. The points of a step are hooks that
`arm` sets, so that ordinary runs have none. Nothing happens in ordinary runs.

Two ways to switch it on:
- `faults.fault_points = callable` in the same process; it may raise (a simulated disk error) or kill.
- `SKIMP_FAULT="point:n"` in the environment: this process kills itself with SIGKILL at the n-th time (from
1) that
  it reaches `point`. SIGKILL, because it is what the kernel's out-of-memory killer sends and cannot be
  tidied up. `"point:n:memory"` asks the allocator for more than there is instead, `"point:n+:memory"` from the
  n-th time on.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError, did_you_mean

if TYPE_CHECKING:
    from skimp.run.build import Run

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
#: In a step: before the middle block runs forward, when its gradient arrives, and when the middle parameter is about to
#: move (its step count has risen, half of the others have moved).
STEP_POINTS = ("forward", "backward", "update")

fault_points: Callable[[str], None] | None = None
_hits = 0


def reach(point: str) -> None:
    """Say that `point` (one of `POINTS` or `STEP_POINTS`) has been reached.

    Raises:
        SkimpError: SKIMP_FAULT is set but is not "point:n" or "point:n:memory" with a known point and n >= 1.
        RuntimeError: the allocator's own, where SKIMP_FAULT asks for it.
    """
    if fault_points is not None:
        fault_points(point)
    asked = os.environ.get("SKIMP_FAULT")
    if asked:
        _fail_if_due(asked, point)


def arm(run: Run) -> None:
    """Set the points of a step on a run; nothing where neither way is switched on."""
    if fault_points is None and not os.environ.get("SKIMP_FAULT"):
        return
    names = run.structure.blocks
    block = run.model.get_submodule(names[len(names) // 2])
    block.register_forward_pre_hook(lambda *_: reach("forward") if torch.is_grad_enabled() else None)
    block.register_forward_hook(_when_its_gradient_comes)
    parameters = run.optimizer.parameters()
    middle, update = parameters[len(parameters) // 2], run.optimizer.update

    def reaching(p: Tensor, *rest: Any) -> None:
        if p is middle:
            reach("update")
        update(p, *rest)

    run.optimizer.update = reaching


def _when_its_gradient_comes(_module: Any, _inputs: Any, output: Any) -> None:
    hidden = output if isinstance(output, Tensor) else output[0]
    if hidden.requires_grad:
        hidden.register_hook(lambda _: reach("backward"))


def exhaust() -> None:
    """Ask the CPU allocator for more than any machine has: its own error, in its own words."""
    torch.empty(1 << 60, dtype=torch.uint8)


def _fail_if_due(asked: str, point: str) -> None:
    global _hits
    wanted, _, rest = asked.partition(":")
    match = re.fullmatch(r"([1-9][0-9]*)(\+?)(:memory)?", rest)
    known = (*POINTS, *STEP_POINTS)
    if wanted not in known or match is None:
        raise SkimpError("SKIMP_FAULT: 'point:n'", f"{asked!r}", "it is a test facility", did_you_mean(wanted, known))
    if point == wanted:
        _hits += 1
        if _hits == int(match[1]) or (match[2] and _hits > int(match[1])):
            if match[3]:
                exhaust()
            os.kill(os.getpid(), signal.SIGKILL)
