"""Options of a parameter group: their ranges, and the learning rate as a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.read import read


def lr_of(group: Mapping[str, Any]) -> float:
    """The learning rate of a group as a number; a tensor (from a scheduler) is read."""
    lr = group["lr"]
    return read(lr, expect=1.0) if isinstance(lr, Tensor) else float(lr)


def check_options(rule: str, lr: Any, betas: Sequence[float], eps: float, weight_decay: float, eps_min: float) -> None:
    """Refuse options out of range, naming the one.

    Raises:
        SkimpError: a negative lr, eps or decay, or a beta outside [0, 1).
    """
    wrong = [
        ("lr", lr, "at least 0", not isinstance(lr, Tensor) and lr < 0),
        ("betas", betas, "two numbers in [0, 1)", len(betas) != 2 or not all(0 <= b < 1 for b in betas)),
        ("eps", eps, f"at least {eps_min}", eps < eps_min),
        ("weight_decay", weight_decay, "at least 0", weight_decay < 0),
    ]
    for name, value, rule_text, bad in wrong:
        if bad:
            raise SkimpError(f"{rule}: {name} {rule_text}", repr(value))
