"""The tracker's count is the sum over live storages, at any moment, and equal to what c10 allocates."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core.memory import tracker as module
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker, at, classify, current, scope


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


@pytest.mark.parametrize("factor", [0.5, -3.0])
def test_a_number_that_autograd_keeps_is_counted(factor: float) -> None:
    """`x * 0.5` keeps a 0-d float64 tensor until backward: 8 bytes, seen by c10 and by no dispatcher."""

    def chain(x: Tensor) -> Tensor:
        return factor * (x * factor) / factor

    x = torch.randn(10, requires_grad=True)
    out, seen = witness(lambda: chain(x))
    del out
    with Tracker() as tracker:
        out = chain(x)
        assert tracker.live == seen.held == 40 + 3 * 8
        del out
        assert tracker.live == 0
    fake = FakeTensorMode()
    with fake, Tracker() as simulated:
        chain(torch.empty(10, requires_grad=True))
    assert simulated.peak.total - 40 == seen.peak


def test_a_number_kept_by_a_tracked_product_changes_no_bit() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(4097, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        plain = (x * 0.044715 / 3.1).to(torch.float64).sum()
        (expected,) = torch.autograd.grad(plain, x)
        with Tracker():
            tracked = (x * 0.044715 / 3.1).to(torch.float64).sum()
            (found,) = torch.autograd.grad(tracked, x)
        assert torch.equal(plain, tracked)
        assert torch.equal(expected, found)
    whole = torch.arange(5)
    with Tracker():
        assert (whole * 0.5).dtype == torch.float32


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
    assert (tracker.timeline or [])[0][1] == 4000
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
        tracker.forget([x])
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
