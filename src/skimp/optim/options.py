"""Options of a parameter group: their ranges, and the learning rate as a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.read import read
from skimp.core.sharded import local


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


def check_dtype(rule: str, name: str, tensor: Tensor) -> None:
    """float32, float64 or bfloat16, of a weight or of its gradient.

    Raises:
        SkimpError: any other dtype; float16 weights lose small updates and its gradients overflow.
    """
    if tensor.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise SkimpError(
            f"{rule} on '{name}'",
            f"dtype {tensor.dtype}",
            "it steps in float32 (float64 for float64 weights) and writes float32, float64 or bf16",
            "model.to(torch.float32) or model.to(torch.bfloat16) before the optimizer",
        )


def state_dtype(rule: str, states: str) -> torch.dtype | None:
    """The dtype of moments by its word; None for the dtype of the arithmetic.

    Raises:
        SkimpError: another word.
    """
    if states not in ("fp32", "bf16"):
        raise SkimpError(f"{rule}: states 'fp32' or 'bf16'", repr(states))
    return torch.bfloat16 if states == "bf16" else None


def check_range(rule: str, **options: tuple[float, float, float]) -> None:
    """Refuse options out of range: name=(value, least, most).

    Raises:
        SkimpError: names the option and its range.
    """
    for name, (value, least, most) in options.items():
        if not least <= value <= most:
            limit = f"at least {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
            raise SkimpError(f"{rule}: {name} {limit}", repr(value))


def check_layout(rule: str, name: str, p: Tensor) -> None:
    """Refuse a parameter that does not lie in row-major order, here or, sharded, its part.

    Raises:
        SkimpError: with its strides.
    """
    if not local(p).is_contiguous():
        raise SkimpError(
            f"{rule} on parameter '{name}'",
            f"shape {tuple(p.shape)} with strides {p.stride()}",
            "states follow the row-major order, and a hidden copy would cost the parameter's bytes",
            "make it contiguous before the optimizer: p.data = p.data.contiguous()",
        )
