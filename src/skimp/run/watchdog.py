"""The watchdog: it sees memory run short before the kernel kills, and says so where a run can still be saved.

Two questions, two places to ask them:

- Did the process exceed its budget? The system keeps the highest resident size, so it is enough to look between two
  optimizer steps; nothing is missed in between.
- Is the machine, or the control group, nearly out? That cannot wait for the end of a step, so a thread samples it. Its
  answer is read before each block of a forward pass: a step that has moved nothing is given up there and can be
  taken again from a checkpoint.

Cost: a sample takes some 60 microseconds four times a second, 0.024 % of one core; a look is one attribute read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from skimp.core.memory.process import Resident, reset_peak, resident
from skimp.core.memory.room import Room
from skimp.core.units import format_bytes
from skimp.run.build import Run

#: Seconds between two samples, and between two where less than eight floors are left.
CALM, ALERT = 0.25, 0.02
#: The budget may be exceeded by `survive.margin` of it, and by this: pages that threads hold for a moment.
MARGIN_LEAST = 16_000_000


class NearlyOut(Exception):
    """Raised before a block of a step that has moved nothing: the machine is nearly out of memory."""


@dataclass(frozen=True)
class Excess:
    """The process held `peak` resident bytes; `allowed` is the budget and its margin."""

    peak: int
    budget: int
    allowed: int

    def __str__(self) -> str:
        over = format_bytes(self.peak - self.budget)
        return f"the process held {format_bytes(self.peak)}, {over} above its budget of {format_bytes(self.budget)}"


class Watchdog:
    """Context manager around training.

    Args:
        run: looked after; may be rebuilt meanwhile.
        budget: resident bytes of the whole process; None where the recipe names none.
        margin: share of the budget that may be exceeded.
        room: what is left on the machine.

    Attributes:
        pressed: why the run must stop, or empty.
        highest: the largest resident size seen, whatever was reset since.
    """

    def __init__(self, run: Run, budget: int | None, margin: float = 0.02, room: Room | None = None) -> None:
        self.run, self.budget = run, budget
        self.allowed = None if budget is None else budget + max(MARGIN_LEAST, int(margin * budget))
        self.room = room or Room()
        self.pressed = ""
        self.highest = 0
        now = resident()
        self._files, self._before = now.files, now.peak
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._hooks: list[Any] = []

    def __enter__(self) -> Watchdog:
        self.attach()
        self._thread = threading.Thread(target=self._sample, name="skimp-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for hook in self._hooks:
            hook.remove()

    def attach(self) -> None:
        """Look before every block of the run's present model."""
        model, blocks = self.run.model, self.run.structure.blocks
        self._hooks = [model.get_submodule(name).register_forward_pre_hook(self._look) for name in blocks]

    def over(self, memory: Resident) -> Excess | None:
        """What the process held too much since the last `restart`; None within the budget and its margin.

        Pages of files mapped since the start do not count: the kernel takes them back when it needs them.
        """
        self.highest = max(self.highest, memory.peak)
        peak = memory.peak - max(0, memory.files - self._files)
        # A mark that has not risen is of what was before, where a system does not let it be set back.
        if self.budget is None or self.allowed is None or peak <= self.allowed or memory.peak <= self._before:
            return None
        return Excess(peak, self.budget, self.allowed)

    def restart(self) -> None:
        """Let the highest resident size count from now on."""
        self.highest = max(self.highest, resident().peak)
        reset_peak()
        self._before = resident().peak

    def _look(self, *_: object) -> None:
        if self.pressed and not self.run.delivery.midway:
            raise NearlyOut(self.pressed)

    def _sample(self) -> None:
        """Two samples in a row below the floor, so that a moment of another process stops nothing."""
        low, wait = 0, CALM
        while not self._ended.wait(wait):
            left = self.room.left()
            if left is None:
                return
            low = low + 1 if left.bytes < left.floor else 0
            room, least = format_bytes(max(0, left.bytes)), format_bytes(left.floor)
            self.pressed = f"{room} of memory are left {left.where}, less than {least}" if low >= 2 else ""
            wait = ALERT if left.bytes < 8 * left.floor else CALM
