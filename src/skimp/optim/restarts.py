"""Momentum resets as a pure function of the step: nothing to save, and a resume anywhere meets the same schedule.

Huang et al., "SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training", 2025, arXiv 2501.06842, algorithm 1:
every so many steps both moments begin again at 0, at the start of a step, and the rate climbs back from a hundredth
over a cosine. The released code leaves the step of the bias correction running, so that the first moves after a reset
are up to 6.6 times too large; here it begins anew with the moments, unless `keep_count`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """Where in its period a step is.

    Attributes:
        reset: the moments are set to 0 before this step.
        period: how many resets there have been, this one included.
        since: steps since the reset, 0 at it; the step itself before the first one.
        count: the step of the bias correction.
        scale: factor on the rate.
    """

    reset: bool
    period: int
    since: int
    count: int
    scale: float


def restart_at(step: int, every: int, warmup: int, keep_count: bool = False) -> Restart:
    """The schedule at `step` (from 1): a reset every `every` steps (0: never), then `warmup` steps of warm-up."""
    if every <= 0 or step < every:
        return Restart(False, 0, step, step, 1.0)
    since = step % every
    count = step if keep_count else since + 1
    return Restart(since == 0, step // every, since, count, 1.0 - cosine_decay(since, warmup))


def cosine_decay(position: int, warmup: int) -> float:
    """0.99 · ½ (1 + cos(π·p / (N + 1))) while p < N, then 0: what the rate lacks of its whole."""
    if position >= warmup:
        return 0.0
    return 0.99 * 0.5 * (1.0 + math.cos(math.pi * position / (warmup + 1)))
