"""Tensors that can be made again from others which backward keeps anyway.

The output of a fused norm or activation is kept by the layer that reads it, although the fused layer keeps the inputs
it was made from. Such an output carries the call that made it; a reader that knows of this keeps the inputs once more
(the same storage, no bytes) instead of the output, and makes it again in backward: one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

_NAME, _READ = "_skimp_remake", "_skimp_read"
T = TypeVar("T")


class Again:
    """Makes one tensor again for all who read it.

    Queries, keys and values read one norm's output, and their backwards follow one another: it is made for the first
    and let go by the last. It holds no input: a recomputed block must be able to drop them.

    Attributes:
        readers: layers that will ask in backward; each adds itself in forward.
    """

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self.make, self.readers = make, 0
        self._asked = 0
        self._made: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The tensor, from `inputs` as autograd kept them and checked their versions."""
        made = self.make(*inputs) if self._made is None else self._made
        self._asked += 1
        self._made = made if self._asked < self.readers else None
        if self._made is None:
            self._asked = 0
        return made


@dataclass(frozen=True)
class Remake:
    """`again(*inputs)` is the tensor, to the bit."""

    again: Again
    inputs: tuple[Tensor, ...]


def can_be_remade(tensor: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Note on `tensor` how it was made, where gradients are recorded at all; returns it."""
    if torch.is_grad_enabled():
        setattr(tensor, _NAME, Remake(Again(make), inputs))
    return tensor


def how_made(tensor: Tensor) -> Remake | None:
    """How a tensor is made again; None where nothing is noted. A view or a copy of it carries no note."""
    found: Remake | None = getattr(tensor, _NAME, None)
    return found


def once_for(tensor: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """What layers keep of `tensor` in its place: made for the first that asks with `key`, the same for all others.

    Noted on the tensor, which the layers let go of long before their graph; the last key only, so that a tensor that
    outlives its step does not gather what was kept of it. A change in place makes it anew.
    """
    noted: tuple[Hashable, T] | None = getattr(tensor, _READ, None)
    if noted is None or noted[0] != (key, tensor._version):
        with torch.no_grad():
            noted = ((key, tensor._version), make())
        setattr(tensor, _READ, noted)
    return noted[1]
