"""What a delivery of gradients asks of an update rule, and the norm it takes of each gradient."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from skimp.core.repeat import rounds

#: Numbers per slice of a half-precision norm: 16 MiB of float32 at a time.
NORM_SLICE = 2**22


class OneByOne(Protocol):
    """What an update rule must offer: update one parameter with its final gradient.

    One that gains by stacking may offer `together` and `step_parameters` too, as `skimp.optim.UpdateRule` does.
    """

    def step_parameter(self, parameter: Tensor, grad: Tensor | None = None) -> None: ...


class AddsUp(OneByOne, Protocol):
    """What a rule with `adds_up` offers: micro-batches of a step added up in less than their gradients' bytes."""

    adds_up: bool

    def add_gradient(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """Keep what the step needs of one micro-batch's gradient; returns the sum so far, in the rule's own form."""

    def add_factors(self, parameter: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The same of leftᵀ·right, (t, m) and (t, n), which need not be formed."""

    def step_added(self, parameter: Tensor) -> None:
        """Update with what was added."""

    def drop_added(self) -> None:
        """Forget what was added: the step broke off."""


def l2_norm(grad: Tensor) -> Tensor:
    """L2 norm in float32 at least: squares of bfloat16 sums would lose everything below 1/256 of the total.

    Half dtypes go slice by slice: torch widens the whole input otherwise, 4 bytes a number of workspace.
    """
    if grad.dtype not in (torch.bfloat16, torch.float16):
        return torch.linalg.vector_norm(grad)
    flat = grad.reshape(-1)
    squares = torch.zeros((), dtype=torch.float32, device=grad.device)
    for start in rounds(range(0, flat.numel(), NORM_SLICE)):
        part = torch.linalg.vector_norm(flat[start : start + NORM_SLICE], dtype=torch.float32)
        squares.addcmul_(part, part)
    return squares.sqrt_()


def finite(value: float) -> bool:
    """Neither NaN nor infinite."""
    return value == value and abs(value) != float("inf")
