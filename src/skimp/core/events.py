"""Things that happen every k optimizer steps: projector refresh, merge-and-restart, layer resampling, resets.

An event changes what the optimizer's moments mean, so whoever declares one must say what becomes of them:

    keep     they stay as they are; right when the space they live in does not change
    align    the new basis is brought into the order and signs of the old one, so that they still fit
    rotate   they are carried over: m <- (new basis)^T (old basis) m
    reset    they are set to zero, and so are their step counts

There is no default: this is where such methods silently differ. The events here only say *when* and *with
which policy*; the update rule that owns the moments carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from skimp.core.errors import CheckpointError, SkimpError, did_you_mean

Moments = Literal["keep", "align", "rotate", "reset"]


@dataclass(frozen=True)
class Firing:
    """What an action is told.

    Attributes:
        step: the optimizer step, from 0, that is about to be taken.
        count: how often this event fired before; 0 at the first time.
        moments: the declared policy.
    """

    step: int
    count: int
    moments: Moments


@dataclass(frozen=True)
class Event:
    """One recurring action; make it with `every`."""

    name: str
    period: int
    action: Callable[[Firing], None]
    moments: Moments
    first: int
    until: int | None
    warmup: int


def every(
    period: int,
    action: Callable[[Firing], None],
    *,
    name: str,
    moments: Moments,
    first: int | None = None,
    until: int | None = None,
    warmup: int = 0,
) -> Event:
    """Run `action` at steps first, first + period, first + 2·period, …

    Args:
        period: optimizer steps between two firings, at least 1.
        action: called before the forward of its step.
        name: key of its state in checkpoints.
        moments: keep, align, rotate or reset.
        first: the first firing; `period` when None, so that nothing happens at step 0. Pass 0 for what must
            be set up before the first step.
        until: no firing at this step or later.
        warmup: steps over which the learning rate rises again after a firing; none after a firing at step 0,
            where the schedule's own warm-up is.

    Raises:
        SkimpError: a value out of range.
    """
    if period < 1 or warmup < 0 or (first is not None and first < 0):
        raise SkimpError(
            f"event '{name}'",
            f"every {period} steps, first {first}, warm-up {warmup}",
            "period >= 1, the others >= 0",
        )
    if moments not in get_args(Moments):
        raise SkimpError(f"event '{name}'", f"moments '{moments}'", instead=did_you_mean(moments, get_args(Moments)))
    if warmup and warmup >= period:
        raise SkimpError(
            f"event '{name}'",
            f"{warmup} steps of warm-up, fired every {period}",
            "the rate would never be full again",
            f"a warm-up of {period - 1} steps at most",
        )
    return Event(name, period, action, moments, period if first is None else first, until, warmup)


@dataclass
class _Record:
    count: int = 0
    last: int | None = None  # the step of the last firing
    period: int | None = None  # only when `set_period` changed it


class Events:
    """The events of a run, fired in the order in which they were given.

    Call `run(step)` once before each optimizer step and multiply the learning rate by `lr_factor(step)`.
    Only counts and steps are saved; periods and policies come from the recipe on resume, unless an event
    adapted its own.
    """

    def __init__(self, *events: Event) -> None:
        self._events = {event.name: event for event in events}
        if len(self._events) < len(events):
            names = [event.name for event in events]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SkimpError("events with names of their own", f"twice: {', '.join(twice)}")
        self._records = {name: _Record() for name in self._events}
        self._step = -1

    def __bool__(self) -> bool:
        return bool(self._events)

    def due(self, step: int) -> list[str]:
        """Names of the events that `run(step)` would fire, in order. Changes nothing."""
        return [name for name in self._events if self._is_due(name, step)]

    def _is_due(self, name: str, step: int) -> bool:
        event, record = self._events[name], self._records[name]
        if event.until is not None and step >= event.until:
            return False
        following = event.first if record.last is None else record.last + self.period(name)
        return step >= following

    def run(self, step: int) -> list[str]:
        """Fire what is due at `step`, and return the names.

        The same step again (a step repeated after running out of memory) fires nothing that it fired before.
        An action that raises counts as not fired.

        Raises:
            SkimpError: steps went back; load the state that belongs to the step first.
        """
        if not self._events:
            return []  # nothing has fired: a run without events may go back without their state
        if step < self._step:
            raise SkimpError(
                f"events of step {step}",
                f"step {self._step} was run before",
                "what fired cannot be undone",
                "load the checkpoint's state first",
            )
        fired = self.due(step)
        for name in fired:
            event, record = self._events[name], self._records[name]
            event.action(Firing(step, record.count, event.moments))
            record.count, record.last = record.count + 1, step
        self._step = step
        return fired

    def lr_factor(self, step: int) -> float:
        """The lowest of the events' warm-ups: (steps since the firing + 1) / (warmup + 1), then 1."""
        lowest = 1.0
        for name, event in self._events.items():
            last = self._records[name].last
            if last and last <= step < last + event.warmup:
                lowest = min(lowest, (step - last + 1) / (event.warmup + 1))
        return lowest

    def period(self, name: str) -> int:
        """The period in force."""
        adapted = self._records[name].period
        return self._events[name].period if adapted is None else adapted

    def set_period(self, name: str, period: int) -> None:
        """Let an action adapt its own period (a lazy refresh when a subspace stays put); saved in
        checkpoints.

        Raises:
            SkimpError: unknown name, or a period below 1 or not above the event's warm-up.
        """
        if name not in self._events:
            raise SkimpError(f"event '{name}'", "no such event", instead=did_you_mean(name, self._events))
        if period < 1 or 0 < period <= self._events[name].warmup:
            raise SkimpError(f"event '{name}'", f"a period of {period}", "at least 1, and longer than its warm-up")
        self._records[name].period = period

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the last step run, and for each event its count, last step and adapted period."""
        return {
            "step": self._step,
            "events": {
                name: {"count": record.count, "last": record.last, "period": record.period}
                for name, record in self._records.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` gave.

        Raises:
            CheckpointError: it has other events than this run.
        """
        saved = state["events"]
        if set(saved) != set(self._events):
            raise CheckpointError(
                f"the state of the events {', '.join(self._events) or 'none'}",
                f"saved: {', '.join(saved) or 'none'}",
                "each event goes on from its own count",
                "resume with the recipe the checkpoint was written with",
            )
        self._records = {name: _Record(**saved[name]) for name in self._events}
        self._step = state["step"]
