"""Parameters sharded over processes (FSDP2's DTensors): the part that is here, and states placed as it is.

An element-wise rule needs nothing of the other processes: it updates the local part with local state. Two things
follow the *whole* parameter all the same: its name and the place of its first local number, so that rounding noise
is that of an unsharded run; and its size, where a rule decides by size, so that every process decides alike.

torch's module of DTensors is never imported here: where it is not loaded there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The numbers held by this process, in place; a plain tensor is itself. Without autograd."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        here: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return here


def alike(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` placed as `model` is: the local part of a gradient must be that of its parameter."""
    if not is_sharded(tensor) or tensor.placements == model.placements:  # type: ignore[attr-defined]
        return tensor
    placed: Tensor = tensor.redistribute(placements=model.placements)  # type: ignore[attr-defined]
    return placed


@dataclass(frozen=True)
class Part:
    """Which numbers of which parameter a rule updates.

    Attributes:
        name: of the whole parameter.
        whole: numbers of the whole parameter.
        offset: place of the first local number in the whole, row-major.
        address: the name that noise is addressed by: `name` wherever the local numbers are one run of the whole
            (any sharding of rows), else the name and the shard's place on the mesh.
    """

    name: str
    whole: int
    offset: int = 0
    address: str = ""


def part_of(name: str, parameter: Tensor) -> Part:
    """The part of a parameter that this process holds."""
    if not is_sharded(parameter):
        return Part(name, parameter.numel(), 0, name)
    p: Any = parameter
    cut = [(i, placement) for i, placement in enumerate(p.placements) if placement.is_shard()]
    if not cut:
        return Part(name, p.numel(), 0, name)
    # A subclass of Shard (torch's strided shards) lays rows out in another order.
    plain = sys.modules["torch.distributed.tensor"].Shard
    if len(cut) == 1 and type(cut[0][1]) is plain and cut[0][1].dim == 0:
        rank, rows = p.device_mesh.get_local_rank(cut[0][0]), -(-p.shape[0] // p.device_mesh.size(cut[0][0]))
        return Part(name, p.numel(), min(rank * rows, p.shape[0]) * prod(p.shape[1:]), name)
    where = ",".join(str(p.device_mesh.get_local_rank(i)) for i, _ in cut)
    return Part(name, p.numel(), 0, f"{name}@{where}")


def largest_part(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the largest local part on any process: torch cuts into ceil(size / processes), the last ones less."""
    shape = list(parameter.shape)
    if is_sharded(parameter):
        p: Any = parameter
        for i, placement in enumerate(p.placements):
            if placement.is_shard():
                shape[placement.dim] = -(-shape[placement.dim] // p.device_mesh.size(i))
    return tuple(shape)


def beside(shape: Sequence[int], parameter: Tensor, block: int) -> tuple[int, ...]:
    """Global shape of a state that has `shape` on each process and describes blocks of `block` numbers.

    Where every part is whole blocks, the parts' blocks are the whole's: the first size times the number of shards,
    which is also the shape without sharding. Elsewhere the blocks lie differently for every way of sharding, and so
    that none is ever read as another the shape tells them apart: (shards, *shape), then a 1 for each thing unlike rows.
    """
    cut = _cut(parameter)
    if not cut:
        return tuple(shape)
    p: Any = parameter
    shards, part = prod(size for size, _ in cut), prod(largest_part(p))
    if len(cut) == 1 and cut[0][1] == 0 and part % block == 0 and part * shards == p.numel():
        return (shape[0] * shards, *shape[1:])
    return (shards, *shape, *[1] * (sum(dim for _, dim in cut) + 2 * (len(cut) - 1)))


def _cut(parameter: Tensor) -> list[tuple[int, int]]:
    """(processes, dimension) of every mesh dimension that shards the parameter."""
    if not is_sharded(parameter):
        return []
    p: Any = parameter
    return [(p.device_mesh.size(i), placed.dim) for i, placed in enumerate(p.placements) if placed.is_shard()]


def zeros_beside(shape: Sequence[int], parameter: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Zeros for `shape` on each process that holds a shard: one DTensor of shape `beside(shape, parameter, block)`."""
    if not is_sharded(parameter):
        return torch.zeros(tuple(shape), dtype=dtype, device=parameter.device)
    p: Any = parameter
    tensors = sys.modules["torch.distributed.tensor"]
    placed = [tensors.Shard(0) if placement.is_shard() else placement for placement in p.placements]
    made: Tensor = tensors.zeros(beside(shape, p, block), dtype=dtype, device_mesh=p.device_mesh, placements=placed)
    return made
