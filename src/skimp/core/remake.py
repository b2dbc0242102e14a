"""Tensors that can be made again from others which backward keeps anyway.

The output of a fused norm or activation is kept by the layer that reads it, although the fused layer keeps the inputs
it was made from. Such an output carries the call that made it; a reader that knows of this keeps the inputs once more
(the same storage, no bytes) instead of the output, and makes it again in backward: one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_NAME = "_skimp_remake"


@dataclass(frozen=True)
class Remake:
    """`make(*inputs)` is the tensor, to the bit."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def can_be_remade(tensor: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Note on `tensor` how it was made, where gradients are recorded at all; returns it."""
    if torch.is_grad_enabled():
        setattr(tensor, _NAME, Remake(make, inputs))
    return tensor


def how_made(tensor: Tensor) -> Remake | None:
    """How a tensor is made again; None where nothing is noted. A view or a copy of it carries no note."""
    found: Remake | None = getattr(tensor, _NAME, None)
    return found
