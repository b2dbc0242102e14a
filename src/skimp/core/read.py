"""The only way a tensor's value reaches the host.

A value that is read stalls a device and cannot exist in a simulation. Here both are in one place: a real tensor
gives its number; a simulated one gives the branch that was declared, which must be the costlier one, so that a
plan never under-predicts. A lint test forbids `.item()`, `.tolist()` and `bool(tensor)` everywhere else.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def read(value: Tensor, expect: float) -> float:
    """The number in a 0-d or one-element tensor.

    Args:
        value: one element, any dtype, real or simulated.
        expect: what a simulated tensor reads as: the declared, costlier branch.
    """
    if is_simulated(value):
        return expect
    return float(value.item())


def is_simulated(value: Tensor) -> bool:
    """True for fake and meta tensors, which have a shape but no values."""
    return isinstance(value, FakeTensor) or value.device.type == "meta"
