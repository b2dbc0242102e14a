"""Schedules against transformers' own, step by step, and their stated rule in warm-up."""

from __future__ import annotations

import pytest
import torch
import transformers

from skimp.core.errors import RecipeError
from skimp.core.schedule import Schedule

LR = 3e-4


def theirs(make, steps: int, **kwargs) -> list[float]:
    """The rates with which transformers' schedule takes steps 0 .. steps-1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer, **kwargs)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def ours(steps: int, **kwargs) -> list[float]:
    schedule = Schedule(LR, steps, **kwargs)
    return [schedule.lr_at(step) for step in range(steps)]


def close(one: list[float], other: list[float]) -> bool:
    # Both are a handful of float64 operations in another order: 1e-12 of the peak is well above it.
    return len(one) == len(other) and all(abs(a - b) <= 1e-12 * LR for a, b in zip(one, other, strict=True))


CASES = {
    "constant": (transformers.get_constant_schedule_with_warmup, {}, False),
    "linear": (transformers.get_linear_schedule_with_warmup, {}, True),
    "cosine": (transformers.get_cosine_schedule_with_warmup, {}, True),
}


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", CASES)
def test_equal_to_transformers_after_warmup_and_everywhere_from_zero(kind: str, warmup: int) -> None:
    make, extra, total = CASES[kind]
    steps = 17
    reference = theirs(
        make, steps, num_warmup_steps=warmup, **extra, **({"num_training_steps": steps} if total else {})
    )
    assert close(ours(steps, kind=kind, warmup=warmup, from_zero=True), reference)
    mine = ours(steps, kind=kind, warmup=warmup)
    assert close(mine[warmup:], reference[warmup:])
    assert close(mine[:warmup], [LR * (s + 1) / (warmup + 1) for s in range(warmup)])
    assert mine[0] > 0


@pytest.mark.parametrize("kind", CASES)
def test_ours_is_theirs_read_one_step_later(kind: str) -> None:
    make, extra, total = CASES[kind]
    steps, warmup = 17, 3
    reference = theirs(
        make,
        steps + 1,
        num_warmup_steps=warmup + 1,
        **extra,
        **({"num_training_steps": steps + 1} if total else {}),
    )
    assert close(ours(steps, kind=kind, warmup=warmup), reference[1:])


def test_cosine_with_a_floor() -> None:
    reference = theirs(
        transformers.get_cosine_with_min_lr_schedule_with_warmup,
        20,
        num_warmup_steps=4,
        num_training_steps=20,
        min_lr_rate=0.1,
    )
    assert close(ours(20, warmup=4, min_ratio=0.1)[4:], reference[4:])


@pytest.mark.parametrize("tail", ["1-sqrt", "linear", "cosine"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_wsd(tail: str, floor: float) -> None:
    reference = theirs(
        transformers.get_wsd_schedule,
        25,
        num_warmup_steps=3,
        num_decay_steps=7,
        num_training_steps=25,
        decay_type=tail,
        min_lr_ratio=floor,
    )
    mine = ours(25, kind="wsd", warmup=3, decay=7, tail=tail, min_ratio=floor)
    assert close(mine[3:], reference[3:])
    assert mine[3:19] == [LR] * 16  # 25 - 3 - 7 stable steps, and the tail's first is at full rate
    if floor == 0.0:
        assert close(ours(25, kind="wsd", warmup=3, decay=7, tail=tail, from_zero=True), reference)


def test_fractions_are_rounded_up_as_in_transformers() -> None:
    assert Schedule(LR, 21, warmup=0.1).warmup_steps == 3
    assert Schedule(LR, 21, warmup=2.0).warmup_steps == 2
    assert Schedule(LR, 21, kind="wsd").decay_steps == 5
    assert Schedule(LR, 3, warmup=2).lr_at(2) == LR


def test_after_the_end_the_floor_stays() -> None:
    for kind in ("cosine", "linear", "wsd"):
        schedule = Schedule(LR, 10, kind=kind, min_ratio=0.25)
        assert [schedule.factor_at(step) for step in (10, 11, 19, 1000)] == [0.25] * 4
        assert schedule.factor_at(9) > 0.25
    assert Schedule(LR, 10, kind="constant").factor_at(99) == 1.0
    with pytest.raises(RecipeError, match="counted from 0"):
        Schedule(LR, 10).lr_at(-1)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"lr": 0.0}, "train.lr"),
        ({"lr": float("nan")}, "train.lr"),
        ({"steps": 0}, "train.steps"),
        ({"min_ratio": 1.5}, "train.min_lr"),
        ({"kind": "cosin"}, "train.schedule"),
        ({"tail": "sqrt"}, "train.tail"),
        ({"warmup": 10}, "train.warmup"),
        ({"warmup": -1}, "train.warmup"),
        ({"warmup": 1.5}, "train.warmup"),
        ({"warmup": True}, "train.warmup"),
        ({"kind": "wsd", "warmup": 6, "decay": 5}, "train.decay"),
        ({"decay": float("nan")}, "train.decay"),
    ],
)
def test_values_out_of_range_are_refused_by_key(change: dict, key: str) -> None:
    with pytest.raises(RecipeError, match=f"^{key}"):
        Schedule(**{"lr": LR, "steps": 10, **change})
