"""Tensors and comparisons shared by the checkpoint tests."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def awkward_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every kind of tensor a run keeps: odd shapes, 0-d, empty, packed, strided."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(7, 13, generator=g)
    return {
        "a.bf16": torch.randn(3, 5, generator=g).bfloat16(),
        "a.fp32": base,
        "a.transposed": torch.randn(5, 3, generator=g).t(),
        "a.slice": torch.randn(9, 8, generator=g)[1::2, 3:],
        "a.one_of_a_column": torch.randn(4, 3, generator=g)[2:3, 1],
        "a.half": torch.randn(11, generator=g).half(),
        "a.double": torch.randn(2, 1, 3, generator=g, dtype=torch.float64),
        "b.packed": torch.randint(0, 256, (17,), generator=g, dtype=torch.uint8),
        "b.bool": torch.randint(0, 2, (3, 3), generator=g).bool(),
        "b.fp8": torch.randn(4, 3, generator=g).to(torch.float8_e4m3fn),
        "b.int8": torch.randint(-128, 127, (5,), generator=g, dtype=torch.int8),
        "c.step": torch.tensor(41 + seed, dtype=torch.int64),
        "c.scalar": torch.tensor(float("nan")),
        "c.empty": torch.empty(0, 4),
    }


def dense(tensor: Tensor) -> Tensor:
    """A row-major copy; `contiguous()` leaves a single element the stride it had in its column."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def raw(tensor: Tensor) -> bytes:
    return dense(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, NaNs and signs of zero included."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def allocated_peak(events: Iterable) -> int:
    """Peak of c10's CPU allocations from the memory events of a torch.profiler run, above its start."""
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
