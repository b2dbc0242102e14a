"""The bytes of a tensor: what can be written as it is, and how to walk over it in bounded pieces.

Contiguous host tensors are handed out in place. Everything else (transposed weights, slices, device tensors)
passes through one staging buffer of 4 MiB, so that neither a save nor a load ever holds a second copy of a
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skimp.core.errors import CheckpointError

CHUNK = 4 * 2**20  # one staging buffer, and the unit between two chances to stop
ALIGNMENT = 64  # bytes: a cache line and an AVX-512 register

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor before its bytes: dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Later:
    """A tensor that is made (fetched from disk, decoded, gathered) only when its turn to be written comes.

    `passed` is told of every piece of it that has been written.
    """

    spec: Spec
    make: Callable[[], Tensor]
    passed: Callable[[Tensor], None] | None = None


def spec_of(name: str, value: Tensor | Later) -> Spec:
    """The spec of an entry; refuses what has no plain bytes.

    Raises:
        CheckpointError: a tensor subclass, a meta or sparse tensor, or a dtype the format does not know.
    """
    if isinstance(value, Later):
        return value.spec
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        kind = type(value).__name__ if value.layout is torch.strided else str(value.layout)
        raise CheckpointError(
            f"saving '{name}'",
            f"a {kind}",
            "only plain tensors have bytes that can be written as they are",
            "save its packed or local tensors, each under its own name",
        )
    if value.device.type == "meta" or value.dtype not in NAMES:
        raise CheckpointError(
            f"saving '{name}'",
            f"{value.dtype} on {value.device}",
            "safetensors cannot hold it",
            f"one of {', '.join(map(str, NAMES))}",
        )
    return Spec(value.dtype, tuple(value.shape))


def aligned_empty(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised host tensor whose first byte lies on a multiple of 64, whatever the allocator does."""
    spec = Spec(dtype, tuple(shape))
    tensor = torch.empty(spec.shape, dtype=dtype)
    if tensor.data_ptr() % ALIGNMENT == 0:  # always so with torch's own CPU allocator
        return tensor
    raw = torch.empty(spec.nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + spec.nbytes].view(dtype).view(spec.shape)


def pieces(tensor: Tensor, limit: int = CHUNK) -> Iterator[Tensor]:
    """Views of `tensor`, in row-major order, each of at most `limit` bytes. Any strides, any device."""
    if tensor.numel() == 0:
        return
    size = tensor.numel() * tensor.element_size()
    if tensor.is_contiguous():
        flat, per_piece = tensor.view(-1), limit // tensor.element_size()
        for start in range(0, flat.numel(), per_piece):
            yield flat[start : start + per_piece]
    elif size <= limit:
        yield tensor
    else:
        row = size // tensor.shape[0]
        if row > limit:
            for index in range(tensor.shape[0]):
                yield from pieces(tensor[index], limit)
        else:
            for start in range(0, tensor.shape[0], limit // row):
                yield tensor[start : start + limit // row]


def raw_bytes(flat: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in place."""
    # as_strided and not view: a single element of a slice is contiguous but may keep a stride of 3.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data


class Staging:
    """One chunk of host memory, made at the first use, through which strided and device tensors pass."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def like(self, piece: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous host tensor of the shape of `piece` over the buffer, of its dtype or another."""
        if self._buffer is None:
            self._buffer = aligned_empty((CHUNK,), torch.uint8)
        dtype = dtype or piece.dtype
        return self._buffer[: piece.numel() * dtype.itemsize].view(dtype).view(piece.shape)


def in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
