"""The recorder of a step's memory: bounded, exact at its peaks, split without remainder."""

from __future__ import annotations

import random

import pytest
import torch

from skimp.core.memory.timeline import Timeline, resident_reader
from skimp.core.memory.tracker import CATEGORIES, Tracker, scope

NAMES = ("weights", "workspace")


def record(totals: list[int], phases: list[str] | None = None, limit: int = 20) -> Timeline:
    ticks = iter(range(len(totals) + 1))
    timeline = Timeline(NAMES, limit, resident=lambda: 7, clock=lambda: next(ticks) * 10**9)
    for number, total in enumerate(totals):
        phase = phases[number] if phases else "forward"
        timeline.add(number, {"weights": total - 1, "workspace": 0}, total, phase, f"block {number}")
    return timeline


@pytest.mark.parametrize("count", [1, 19, 20, 777, 100_003])
def test_it_stays_small_and_loses_no_peak(count: int) -> None:
    rng = random.Random(count)
    totals = [rng.randrange(1, 10**9) for _ in range(count)]
    timeline = record(totals)
    assert len(timeline) <= 20
    drawn = timeline.as_dict()
    points = list(zip(drawn["operator"], drawn["bytes"]["weights"], drawn["bytes"]["workspace"], strict=True))
    assert points == sorted(points)
    for operator, weights, workspace in points:  # nothing is averaged: each point is an event as it was
        assert (weights + 1, workspace) == (totals[operator], 1)
    stride = drawn["stride"]
    for begin in range(0, count, stride):
        fullest = max(totals[begin : begin + stride])
        assert any(totals[o] >= fullest for o, _, _ in points if begin - stride < o < begin + 2 * stride)
    assert max(w for _, w, _ in points) == max(totals) - 1


def test_a_point_never_joins_two_phases_until_there_is_no_other_way() -> None:
    phases = ["forward"] * 30 + ["backward"] * 30
    drawn = record([1] * 29 + [500] + [400] * 30, phases).as_dict()
    names = [drawn["phases"][p] for p in drawn["phase"]]
    assert names == sorted(names, reverse=True)  # forward, then backward
    assert drawn["operator"][names.index("backward")] in range(30, 34)
    assert drawn["owners"][drawn["owner"][names.index("backward") - 1]] == "block 29"
    confetti = record(list(range(1, 1001)), ["a", "b"] * 500)
    assert len(confetti) <= 20


def test_one_phase_and_resident_column() -> None:
    drawn = record([3, 5, 4]).as_dict()
    assert (drawn["seconds"], drawn["resident"], drawn["stride"]) == ([1, 2, 3], [7, 7, 7], 1)
    assert Timeline(NAMES).as_dict()["resident"] is None


def test_the_tracker_records_its_own_peak() -> None:
    timeline = Timeline(CATEGORIES, limit=8)
    with Tracker(timeline=timeline) as tracker:
        with scope("activations", "forward", "block 0"):
            kept = [torch.zeros(n) for n in (10, 1000, 20)]
            kept[1].mul_(0.5)  # a workspace inside: the number as float64 and as float32
        with scope("logits", "backward"):
            del kept[1]
            torch.ones(30).sum()
    drawn = timeline.as_dict()
    totals = [sum(parts) for parts in zip(*drawn["bytes"].values(), strict=True)]
    assert max(totals) == tracker.peak.total == 4 * 1030 + 12
    place = totals.index(max(totals))
    assert drawn["bytes"]["workspace"][place] == 12
    assert drawn["owners"][drawn["owner"][place]] == "block 0"
    assert [drawn["phases"][p] for p in drawn["phase"]][-1] == "backward"


def test_resident_memory_is_read_of_this_process() -> None:
    read = resident_reader()
    assert read is None or 10**6 < read() < 10**12
