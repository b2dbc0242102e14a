"""A tracker's trace holds every allocation and release in order; its replay is the allocator's answer to the step."""

from __future__ import annotations

import torch

from skimp.core.memory.cuda_settings import MIB, AllocatorSettings
from skimp.core.memory.trace import Trace, replay
from skimp.core.memory.tracker import Tracker, scope
from skimp.core.workspace import declared


def step(trace: Trace | None) -> Tracker:
    """A product and its gradients, real tensors, in two phases."""
    g = torch.Generator().manual_seed(3)
    x, w = (torch.randn(n, 96, generator=g, requires_grad=True) for n in (70, 50))
    with Tracker(host_rules=False, trace=trace) as tracker:
        tracker.hold((x, w), "weights")
        with scope(phase="forward", owner="block 0"):
            out = torch.relu(x @ w.t()) @ w
        with scope(phase="backward", owner="block 0"):
            out.sum().backward()
        assert x.grad is not None
        del out, x, w
    return tracker


def test_what_the_trace_asks_for_is_what_the_tracker_counts() -> None:
    trace = Trace()
    tracker = step(trace)
    live = peak = 0
    sizes: dict[int, int] = {}
    for key, size in trace.events():
        if size > 0:
            assert key not in sizes, "a key is used once at a time"
            sizes[key] = size
            live += size
        else:
            live -= sizes.pop(key)
        peak = max(peak, live)
    assert peak == tracker.peak.total
    assert live == tracker.live == 0
    assert replay(trace).requested == peak


def test_events_know_their_place() -> None:
    trace = Trace()
    step(trace)
    phases = [trace.place(i)[0] for i in range(len(trace))]
    assert list(dict.fromkeys(phases)) == ["", "forward", "backward"]
    found = replay(trace)
    assert found.fits
    assert found.reserved == 2 * MIB
    assert found.fragmentation == 2 * MIB - found.allocated
    tight = replay(trace, capacity=MIB)
    assert not tight.fits
    assert tight.place == ("", "")
    assert tight.as_dict()["where"] == ""


def test_a_handle_takes_its_workspace_once_in_each_of_two_threads() -> None:
    """Forward's and autograd's threads open one each, at their first product, and keep it."""
    trace = Trace(workspace=8_519_680)
    step(trace)
    held = [(key, trace.place(i)[0]) for i, (key, size) in enumerate(trace.events()) if size == 8_519_680]
    assert [phase for _, phase in held] == ["forward", "backward"]
    assert all((key, -1) not in set(trace.events()) for key, _ in held)
    assert replay(trace).reserved == 22 * MIB  # both lie in one segment of 20 MiB


def test_what_an_operator_takes_inside_comes_and_goes() -> None:
    trace = Trace()
    assert "aten::mm" in declared()
    apart = torch.ones(64, 128, 2)[..., 0]  # neither rows nor columns lie together: copied, on every CPU
    with Tracker(trace=trace), torch.no_grad():
        apart @ torch.ones(128, 8)
    inside = [size for key, size in trace.events() if key == -1]
    assert len(inside) == 2
    assert inside[0] > 0
    assert inside[1] == -1


def test_fragmentation_that_expandable_segments_do_not_have() -> None:
    """A tensor that grows a little at every step (generation) leaves a segment of each size behind."""
    trace = Trace()
    for mib in range(30, 60, 2):
        trace.malloc(1, mib * MIB)
        trace.free(1, mib * MIB)
    fixed, grown = replay(trace), replay(trace, AllocatorSettings(expandable=True))
    assert fixed.allocated == grown.allocated == 58 * MIB
    assert fixed.reserved == sum(range(30, 60, 2)) * MIB
    assert grown.reserved == 60 * MIB
    tight = replay(trace, capacity=100 * MIB)
    assert tight.fits
    assert tight.retries == 8  # at 36, 40, 44, 48, 52, 54, 56 and 58 MiB
    assert replay(trace, capacity=57 * MIB).fits is False
