"""The independent witness: the c10 allocator's own events, as torch's profiler records them.

It knows nothing of skimp's tracker, sees every allocation that ATen makes through its allocator (also inside one
operator), and is what "simulated = measured" is tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Witness:
    """Allocator events of one call.

    Attributes:
        peak: highest running sum of event bytes, from zero at the start of the call.
        held: running sum at the end: what the call left alive less what it freed of before.
        events: signed bytes in order of time.
    """

    peak: int
    held: int
    events: tuple[int, ...]


def witness(call: Callable[[], Any], device: str = "cpu") -> tuple[Any, Witness]:
    """Run `call` under the profiler and return its result with the allocator's events on `device`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        result = call()
    kind = 0 if device == "cpu" else 1
    found = [
        (event.start_ns(), index, event.nbytes())
        for index, event in enumerate(recording.profiler.kineto_results.events())
        if event.name() == "[memory]" and event.device_type().value == kind
    ]
    running = peak = 0
    events = []
    for _, _, size in sorted(found):
        running += size
        peak = max(peak, running)
        events.append(size)
    return result, Witness(peak, running, tuple(events))
