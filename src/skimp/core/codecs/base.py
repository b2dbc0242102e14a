"""What a codec is: one interface for weights, states, saved activations, caches and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.registry import load


@runtime_checkable
class Codec(Protocol):
    """A storage format for tensors.

    Attributes:
        name: its name in the registry and in `meta()`.
        block: elements that share side information; a shard along dim 0 has to hold whole blocks. 1 when none
            share.
    """

    name: str
    block: int

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The parts that stand for `x`: plain tensors that save, shard and move like any other."""
        ...

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of `shape` and `dtype` from the parts, computed in float32 and rounded once."""
        ...

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of all parts for a tensor of `shape`; equals what `encode` allocates."""
        ...

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        """0-dim bool, True when what was encoded was finite: the flag to read where values may be read."""
        ...

    def meta(self) -> dict[str, Any]:
        """JSON that rebuilds the codec through `from_meta`."""
        ...


def from_meta(meta: Mapping[str, Any]) -> Codec:
    """The codec that wrote `meta`.

    Raises:
        SkimpError: no "codec" key, an unknown codec, or options it does not take.
    """
    options = dict(meta)
    name = options.pop("codec", None)
    if not isinstance(name, str):
        raise SkimpError("the meta of a codec", f"no 'codec' in {dict(meta)!r}", instead="pass what meta() gave")
    try:
        codec: Codec = load(name, "codec")(**options)
    except TypeError as error:
        raise SkimpError(f"codec '{name}' with {options}", str(error), instead="pass what meta() gave") from error
    return codec


def count(shape: Sequence[int]) -> int:
    """Elements of a shape; 1 for ()."""
    n = 1
    for size in shape:
        n *= size
    return n


def check_floating(name: str, x: Tensor) -> None:
    """Refuse integers and complex numbers before they are cast in silence."""
    if not x.dtype.is_floating_point:
        raise SkimpError(
            f"codec '{name}' on a tensor of {tuple(x.shape)}",
            f"dtype {x.dtype}",
            "it stores real floating-point values",
            "keep the tensor as it is, or cast it to float32 first",
        )
