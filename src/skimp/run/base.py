"""Which base an adapter was trained on: a fingerprint of the very bytes, taken when they are loaded.

A checkpoint of an adapter holds the adapter alone; a resume loads the base from its source again. Names and revisions
do not say that a folder's weights are the same as last week, the bytes do. One pass over them, about a second a GB.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import SkimpError
from skimp.run.tensor_bytes import Staging, in_place, pieces, raw_bytes


def fingerprint(model: nn.Module) -> str:
    """16 hexadecimal digits over name, dtype, shape and bytes of every parameter, tied ones once."""
    digest, staging = hashlib.sha256(), Staging()
    for name, dtype, shape, total in sums(model, staging):
        digest.update(line(name, dtype, shape, total))
    return digest.hexdigest()[:16]


def sums(model: nn.Module, staging: Staging) -> Iterator[tuple[str, torch.dtype, torch.Size, int]]:
    """Name, dtype, shape and crc32 of every weight in the order of `named_parameters`, tied ones once.

    Of a coded layer those of the dense weight that was encoded: the base is the same, however it is kept."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        at = f"{prefix}." if prefix else ""
        if isinstance(module, CodedLinear):
            if module.dense_crc is None:
                raise SkimpError(f"the fingerprint of {prefix}", "its weight was not encoded here")
            shape = module.weight.shape[::-1] if module.stored_transposed else module.weight.shape
            yield f"{at}weight", module.dtype, torch.Size(shape), module.dense_crc
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{at}{name}", parameter.dtype, parameter.shape, checksum(parameter.detach(), staging)


def line(name: str, dtype: torch.dtype, shape: torch.Size, crc: int) -> bytes:
    """What of one tensor goes into a fingerprint; adapters in the world hold such fingerprints, so it never changes."""
    return f"{name} {dtype} {tuple(shape)} {crc:08x}\n".encode()


def checksum(tensor: Tensor, staging: Staging) -> int:
    """crc32 of a tensor's bytes in row-major order, wherever it lies."""
    total = 0
    for piece in pieces(tensor):
        if not in_place(piece):
            piece = staging.like(piece).copy_(piece)
        total = zlib.crc32(raw_bytes(piece), total)
    return total


class Fingerprinted:
    """What fills a model, and notes the fingerprint of what it was filled with.

    Attributes:
        value: the fingerprint; empty before the call.
    """

    def __init__(self, fill: Callable[[nn.Module], None]) -> None:
        self._fill = fill
        self.value = ""

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        self._fill(model)
        self.value = fingerprint(model)
