"""Learning-rate schedules as pure functions of the step.

No state, so nothing to save, to double on resume or to go stale: the rate of step s depends on s and the
recipe.

The rule, with T steps, W of warm-up, s from 0, r the floor ratio:
    s < W      lr · (s + 1) / (W + 1)          the first step is not lost at rate 0, and step W is the first
    at full lr s >= W     lr · (r + (1 - r) · shape((s - W) / (T - W)))
With `from_zero` the warm-up is s / W instead, and every kind but WSD's warm-up above a floor equals
`transformers.get_*_schedule*` at every step; without it they are equal from step W on, and the whole of ours
is theirs with one more step of warm-up, one more in total, read one step later. Example: lr 3e-4, W = 2:
1e-4, 2e-4, 3e-4, where theirs has 0, 1.5e-4, 3e-4. After the end (s >= T) the floor stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from skimp.core.errors import RecipeError, did_you_mean

Kind = Literal["cosine", "linear", "constant", "wsd"]
Tail = Literal["1-sqrt", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every optimizer step.

    Attributes:
        lr: the peak rate.
        steps: T, all optimizer steps of the run.
        kind: cosine and linear fall from the end of warm-up to the last step; constant does not fall; wsd
            (warm-up, stable, decay; MiniCPM, 2024, arXiv 2404.06395) is constant, then falls in a tail.
        warmup: steps (int), or a fraction of T (float below 1, rounded up).
        min_ratio: r, the floor as a part of lr.
        decay: wsd's tail: steps (int), or a fraction of T (float below 1, rounded up).
        tail: shape of wsd's tail; 1-sqrt did best in Hägele et al., 2024, arXiv 2405.18392, section 3.
        from_zero: begin the warm-up at rate 0, as transformers does.

    Raises:
        RecipeError: a value out of range, by its key.
    """

    lr: float
    steps: int
    kind: Kind = "cosine"
    warmup: int | float = 0
    min_ratio: float = 0.0
    decay: int | float = 0.2
    tail: Tail = "1-sqrt"
    from_zero: bool = False

    def __post_init__(self) -> None:
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise RecipeError("train.lr", f"{self.lr}", "it must be above 0 and finite", "2e-5 for fine-tuning")
        if self.steps < 1:
            raise RecipeError("train.steps", f"{self.steps}", "there must be at least one step")
        if not 0 <= self.min_ratio <= 1:
            raise RecipeError(
                "train.min_lr", f"{self.min_ratio}", "it is a part of lr, from 0 to 1", "train.min_lr=0.1"
            )
        if self.kind not in get_args(Kind):
            raise RecipeError("train.schedule", f"'{self.kind}'", instead=did_you_mean(self.kind, get_args(Kind)))
        if self.tail not in get_args(Tail):
            raise RecipeError("train.tail", f"'{self.tail}'", instead=did_you_mean(self.tail, get_args(Tail)))
        warm, tail = self.warmup_steps, self.decay_steps
        if warm >= self.steps:
            raise RecipeError(
                "train.warmup",
                f"{warm} of {self.steps} steps",
                "the rate would never reach lr",
                f"train.warmup={self.steps - 1} at most, or more steps",
            )
        if self.kind == "wsd" and warm + tail > self.steps:
            raise RecipeError(
                "train.decay",
                f"{tail} steps after {warm} of warm-up, of {self.steps} in all",
                "they overlap",
                f"train.decay={self.steps - warm} at most",
            )

    @property
    def warmup_steps(self) -> int:
        """W."""
        return _steps("train.warmup", self.warmup, self.steps)

    @property
    def decay_steps(self) -> int:
        """The length of wsd's tail."""
        return _steps("train.decay", self.decay, self.steps)

    def lr_at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        return self.lr * self.factor_at(step)

    def factor_at(self, step: int) -> float:
        """`lr_at` as a part of lr.

        Raises:
            RecipeError: a step below 0.
        """
        if step < 0:
            raise RecipeError(f"the learning rate of step {step}", why="steps are counted from 0")
        warm = self.warmup_steps
        if step < warm:
            return step / warm if self.from_zero else (step + 1) / (warm + 1)
        return self.min_ratio + (1.0 - self.min_ratio) * self._shape(step, warm)

    def _shape(self, step: int, warm: int) -> float:
        """From 1 to 0."""
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            begin = self.steps - self.decay_steps
            return 1.0 if step < begin else _fall(self.tail, step - begin, self.decay_steps)
        return _fall(self.kind, step - warm, self.steps - warm)


def _fall(shape: str, done: int, length: int) -> float:
    if done >= length:
        return 0.0
    progress = done / length
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "1-sqrt":
        return 1.0 - math.sqrt(progress)
    return 1.0 - progress


def _steps(key: str, value: int | float, total: int) -> int:
    """Steps, from steps or from a fraction of all."""
    whole = isinstance(value, int) or value.is_integer()
    if isinstance(value, bool) or value < 0 or not (value < 1 or whole):
        raise RecipeError(key, f"{value!r}", instead="a number of steps, or a fraction below 1")
    if isinstance(value, float) and value < 1:
        return math.ceil(value * total)
    return int(value)
