"""Numbers into 4-bit codes and back: of a derivative by the cell its x lies in, of a block over its largest magnitude.

Blocks of 64 take 32 bytes, number j in the lower half of byte j and number j + 32 in the upper; a short last block is
filled with zeros. A native form (`kernels.native.derivative`) takes contiguous
float32 on a CPU without any scratch; elsewhere the torch form below goes a piece at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from skimp.activations.derivative_tables import BLOCK, Cells, block_edges, block_levels
from skimp.core.repeat import rounds
from skimp.core.target import target_device
from skimp.kernels.native import derivative as native

#: Numbers that the torch forms widen at once: a multiple of the block, 1 MiB in float32.
PIECE = 2**18


def is_native(*tensors: Tensor) -> bool:
    """Whether the native form takes these: facts of shape, type and place, never of values."""
    fits = all(t.dtype == torch.float32 and t.is_contiguous() and t.device.type == "cpu" for t in tensors)
    return fits and target_device() == "cpu" and native.available()


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of what is coded at once."""
    for start in rounds(range(0, count, PIECE)):
        yield start, min(start + PIECE, count)


def code_bytes(count: int) -> int:
    """Bytes of the codes of so many numbers in a row."""
    return 32 * -(-count // BLOCK)


def pack(index: Tensor) -> Tensor:
    """(…, n) codes below 16 -> (…, 32 ceil(n / 64)) bytes; what is filled in has code 0."""
    index = torch.nn.functional.pad(index.to(torch.uint8), (0, -index.shape[-1] % BLOCK))
    halves = index.reshape(*index.shape[:-1], -1, 2, BLOCK // 2)
    codes: Tensor = halves[..., 0, :] + 16 * halves[..., 1, :]
    return codes.flatten(-2)


def unpack(codes: Tensor, count: int) -> Tensor:
    """The way back, (…, n) codes, int64: indexing would widen them out of sight."""
    blocks = codes.reshape(*codes.shape[:-1], -1, BLOCK // 2)
    halves = torch.stack([blocks & 15, blocks >> 4], -2).flatten(-3)
    return halves[..., :count].long()


def pack_bits(mask: Tensor) -> Tensor:
    """(n,) truth values -> (ceil(n / 8),) bytes."""
    rest = -mask.numel() % 8
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, rest)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits << shifts).sum(-1, dtype=torch.uint8)


def unpack_bits(codes: Tensor, count: int) -> Tensor:
    """(ceil(n / 8),) bytes -> (n,) 0 or 1, uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    return ((codes.unsqueeze(-1) >> shifts) & 1).flatten()[:count]


# ---- derivatives


def code_derivative(x: Tensor, cells: Cells) -> Tensor:
    """Codes of f'(x), 32 ceil(n / 64) bytes, by the intervals of x; no derivative is computed."""
    if is_native(x):
        found: Tensor = torch.ops.skimp.derivative_code(x, list(cells.edges), list(cells.codes), list(cells.levels))
        return found
    flat = x.reshape(-1)
    codes = torch.empty(code_bytes(flat.numel()), dtype=torch.uint8, device=x.device)
    edges = torch.tensor(cells.edges, dtype=torch.float64, device=x.device)
    names = torch.tensor(cells.codes, dtype=torch.uint8, device=x.device)
    for start, stop in pieces(flat.numel()):
        index = torch.bucketize(flat[start:stop].double(), edges)
        codes[start // 2 : code_bytes(stop)].copy_(pack(names[index]))
    return codes


def times_derivative(dy: Tensor, codes: Tensor, cells: Cells) -> Tensor:
    """dy times the coded derivative, like dy."""
    if is_native(dy):
        found: Tensor = torch.ops.skimp.derivative_back(
            dy, codes, list(cells.edges), list(cells.codes), list(cells.levels)
        )
        return found
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    flat, out = dy.reshape(-1), dx.view(-1)
    levels = torch.tensor(cells.levels, dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
    for start, stop in pieces(flat.numel()):
        slope = levels[unpack(codes[start // 2 : code_bytes(stop)], stop - start)]
        out[start:stop].copy_(flat[start:stop] * slope)
    return dx


# ---- blocks


def block_bytes(width: int) -> int:
    """Bytes of one row of codes and maxima."""
    return code_bytes(width) + 4 * -(-width // BLOCK)


def code_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, width) -> codes (rows, 32 ceil(width / 64)), float32 maxima (rows, ceil(width / 64)) of its blocks."""
    rows, width = x.shape
    blocks = -(-width // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - width)).view(rows, blocks, BLOCK)
    most = padded.abs().amax(-1)
    unit = padded * torch.where(most > 0, 1.0 / most, 0.0).unsqueeze(-1)
    index = torch.bucketize(unit, torch.tensor(block_edges(), device=x.device))
    return pack(index.view(rows, -1)[:, :width]), most


def value_of_blocks(codes: Tensor, most: Tensor, width: int) -> Tensor:
    """The way back, (rows, width) float32."""
    levels = torch.tensor(block_levels(), device=codes.device)
    value = levels[unpack(codes, width)]
    return value * most.repeat_interleave(BLOCK, -1)[:, :width]


# ---- operators: the native forms, which allocate nothing but what they return


@torch.library.custom_op("skimp::derivative_code", mutates_args=())
def _code(x: Tensor, edges: list[float], cells: list[int], levels: list[float]) -> Tensor:
    codes = torch.empty(code_bytes(x.numel()), dtype=torch.uint8)
    table = native.cells(tuple(edges), tuple(cells), tuple(levels))
    native.call("skimp_derivative_code", table, x, codes, x.numel())
    return codes


@_code.register_fake
def _(x: Tensor, edges: list[float], cells: list[int], levels: list[float]) -> Tensor:
    return x.new_empty(code_bytes(x.numel()), dtype=torch.uint8)


@torch.library.custom_op("skimp::derivative_back", mutates_args=())
def _back(dy: Tensor, codes: Tensor, edges: list[float], cells: list[int], levels: list[float]) -> Tensor:
    dx = torch.empty_like(dy)
    table = native.cells(tuple(edges), tuple(cells), tuple(levels))
    native.call("skimp_derivative_back", table, dy, codes, dx, dy.numel())
    return dx


@_back.register_fake
def _(dy: Tensor, codes: Tensor, edges: list[float], cells: list[int], levels: list[float]) -> Tensor:
    return torch.empty_like(dy)
