"""The tracker's count is the sum over live storages, at any moment, and equal to what c10 allocates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from skimp.core.memory import tracker as module
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker, at, classify, current, numbers_seen, scope


def alive(before: set[int]) -> int:
    """Bytes of unique storages of all live tensors that were not there before."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and id(thing) not in before:
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@pytest.fixture
def before() -> set[int]:
    gc.collect()
    return {id(t) for t in gc.get_objects() if isinstance(t, Tensor)}


def test_live_bytes_are_the_sum_over_live_unique_storages(before: set[int]) -> None:
    """Outside autograd every live storage has a Python tensor, so the garbage collector is a second count."""
    g = torch.Generator().manual_seed(3)
    with Tracker() as tracker, torch.no_grad():
        held: list[Tensor] = [torch.randn(31, 17, generator=g)]
        for step in range(25):
            choice = int(torch.randint(0, 5, (1,), generator=g))
            x = held[step % len(held)]
            if choice == 0:
                held.append(x.t())  # a view: no new bytes
            elif choice == 1:
                held.append(x * 2 + 1)
            elif choice == 2:
                held.append(x[1:5].clone() if x.shape[0] > 5 else x.sum(0, keepdim=True))
            elif choice == 3 and len(held) > 3:
                held.pop(0)
            else:
                held.extend(x.chunk(2))
            del x
            assert tracker.live == alive(before)
        assert tracker.live == sum(tracker.by_category.values()) > 0
        held.clear()
        gc.collect()
        assert tracker.live == alive(before) == 0


def test_activations_live_as_long_as_autograd_keeps_them() -> None:
    x = torch.randn(8, 16)
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    with Tracker() as tracker:
        tracker.hold(layers.parameters(), "weights")
        tracker.hold([x], "batch")
        rest = tracker.live
        loss = layers(x).sum()
        # Kept: GELU's input and its output (input of the second Linear), 8 x 32 floats each; and the loss
        # itself.
        assert tracker.live - rest == 2 * 8 * 32 * 4 + 4
        loss.backward()
        grads = sum(p.numel() * 4 for p in layers.parameters())
        assert tracker.live - rest == grads + 4
        layers.zero_grad()
        del loss
        assert tracker.live == rest


def numbers(x: Tensor) -> Tensor:
    """Six kept numbers: 0.5 twice, an int, a divisor, a dividend and one in place; 3 kept rows of the squares."""
    with numbers_seen():
        y = 0.5 * (x * 0.5) * 3 / 7.0
        return (2.0 / (y.square() + 1)).mul_(0.1)


def recomputed(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(numbers, x, use_reentrant=False, preserve_rng_state=False)
    return out


@pytest.mark.parametrize("function", [numbers, recomputed])
def test_a_number_that_autograd_keeps_is_counted_until_its_backward(
    function: Callable[[Tensor], Tensor],
) -> None:
    """`x * 0.5` keeps a 0-d tensor of 8 bytes: c10 sees it, the dispatcher does not, recompute keeps it too."""
    x = torch.randn(1000, requires_grad=True)

    def both(x: Tensor) -> None:
        function(x).sum().backward()

    out, seen = witness(lambda: function(x))
    assert 6 * 8 == seen.held % 4000 > 0
    both(x)
    x.grad = None
    _, whole = witness(lambda: both(x))
    x.grad = None
    with Tracker() as tracker:
        tracker.hold([x], "weights")
        again = function(x)
        assert tracker.live - 4000 == seen.held
        assert tracker.peak.total - 4000 == seen.peak
        assert torch.equal(out, again)
        del again
        assert tracker.live == 4000  # a graph that is dropped without backward takes its numbers along
        both(x)
        assert tracker.live == 2 * 4000
        assert tracker.peak.total - 4000 == whole.peak
    mode = FakeTensorMode()
    with mode, Tracker() as simulated:
        both(torch.empty(1000, requires_grad=True))
    assert simulated.peak.total == tracker.peak.total


def test_peak_has_an_address_and_shares_that_add_up() -> None:
    with Tracker(timeline=True, operators=True) as tracker:
        with scope("logits", "forward", "head"):
            big = torch.zeros(1000)
            at("somewhere else")
        with scope("activations"):
            small = torch.zeros(10)
        del big
        later = torch.zeros(100)
    assert tracker.peak.total == 4040
    assert tracker.peak.by_category["logits"] == 4000
    assert tracker.peak.where() == "aten::zeros"
    assert sum(tracker.peak.by_category.values()) == tracker.peak.total
    assert tracker.peaks["forward", "head"] == 4000
    assert tracker.timeline is not None
    assert tracker.timeline.as_dict()["bytes"]["logits"] == [4000, 4000, 0]
    assert len(tracker.operators or []) == tracker.count
    assert small.numel() + later.numel() == 110
    tracker.reset_peak()
    assert tracker.peak.total == tracker.live == 440
    assert tracker.peaks == {}


def test_hold_registers_once_and_moves_between_categories() -> None:
    x = torch.zeros(25)
    with Tracker() as tracker:
        tracker.hold([x, x.view(5, 5)], "weights")
        assert tracker.live == 100
        classify([x], "gradients")
        assert (tracker.by_category["weights"], tracker.by_category["gradients"]) == (0, 100)
        del x
        assert tracker.live == 0
    assert current() is None
    with scope("weights"):  # outside a tracker it does nothing
        at("nowhere")


def test_inner_tracker_is_current_and_the_stack_survives_an_error() -> None:
    with Tracker() as outer:
        with pytest.raises(ValueError, match="stop"), Tracker():
            raise ValueError("stop")
        assert current() is outer
    assert module._active == []


def test_workspace_of_an_operator_counts_beside_its_outputs_only_while_it_runs() -> None:
    x = torch.zeros(100)
    with Tracker() as tracker, torch.no_grad():
        tracker.hold([x], "weights")
        x.mul_(0.5)
        assert tracker.live == 400
        # The number as float64, and cast to float32.
        assert tracker.peak.total == 412
        assert tracker.peak.by_category["workspace"] == 12
    with Tracker(host_rules=False) as other, torch.no_grad():
        other.hold([x], "weights")
        x.mul_(0.5)
    assert other.peak.total == 400


def test_reading_a_value_is_not_an_operator_of_the_step() -> None:
    from skimp.core.read import read

    x: Any = torch.ones(())
    with Tracker(operators=True) as tracker:
        read(x, expect=0.0)
    assert tracker.operators == []
