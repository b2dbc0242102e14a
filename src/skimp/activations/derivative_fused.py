"""Gated products and norms with 4-bit savings as operators: the native forms behind `derivative`, in one pass each.

They allocate what they return and nothing else, so what a plan counts is what runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.activations.derivative_codes import code_bytes
from skimp.activations.derivative_tables import BLOCK, Cells, block_edges, block_levels, cells
from skimp.kernels.native import derivative as native

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _table(found: Cells) -> object:
    return native.cells(found.edges, found.codes, found.levels)


def _map() -> object:
    return native.block_map(block_levels(), block_edges())


def _rows(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _gated_parts(a: Tensor) -> Parts:
    rows, width = _rows(a)

    def codes() -> Tensor:
        return a.new_empty(rows, code_bytes(width), dtype=torch.uint8)

    def most() -> Tensor:
        return a.new_empty(rows, -(-width // BLOCK))

    return codes(), codes(), most(), codes(), most()


@torch.library.custom_op("skimp::gated_code", mutates_args=())
def gated_code(a: Tensor, c: Tensor, kind: str, grid: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Codes of f'(a), of c with its blocks' maxima, and of f(a) with its; float32, contiguous, of one shape."""
    parts = _gated_parts(a)
    table = _table(cells(kind, grid))
    native.call("skimp_gated_code", table, _map(), a, c, *parts, *_rows(a), int(kind == "gelu_tanh"))
    return parts


@gated_code.register_fake
def _(a: Tensor, c: Tensor, kind: str, grid: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gated_parts(a)


@torch.library.custom_op("skimp::gated_back", mutates_args=())
def gated_back(
    dy: Tensor, slopes: Tensor, c: Tensor, c_most: Tensor, f: Tensor, f_most: Tensor, kind: str, grid: str
) -> tuple[Tensor, Tensor]:
    """da = dy c f'(a) and dc = dy f(a)."""
    da, dc = torch.empty_like(dy), torch.empty_like(dy)
    table = _table(cells(kind, grid))
    native.call("skimp_gated_back", table, _map(), dy, slopes, c, c_most, f, f_most, da, dc, *_rows(dy))
    return da, dc


@gated_back.register_fake
def _(
    dy: Tensor, slopes: Tensor, c: Tensor, c_most: Tensor, f: Tensor, f_most: Tensor, kind: str, grid: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dy), torch.empty_like(dy)


def _norm_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = _rows(x)
    codes = x.new_empty(rows, code_bytes(width), dtype=torch.uint8)
    return codes, x.new_empty(rows, -(-width // BLOCK)), x.new_empty(rows)


@torch.library.custom_op("skimp::norm_code", mutates_args=())
def norm_code(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and maxima of the normalised rows, and 1 / deviation of each; float32, contiguous."""
    parts = _norm_parts(x)
    native.call("skimp_norm_code", _map(), x, *parts, *_rows(x), eps, int(centred))
    return parts


@norm_code.register_fake
def _(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _norm_parts(x)


@torch.library.custom_op("skimp::norm_back", mutates_args=())
def norm_back(dy: Tensor, gain: Tensor, codes: Tensor, most: Tensor, scale: Tensor, centred: bool) -> Tensor:
    """The gradient of a norm's input from what `norm_code` kept."""
    dx = torch.empty_like(dy)
    native.call("skimp_norm_back", _map(), dy, gain, codes, most, scale, dx, *_rows(dy), int(centred))
    return dx


@norm_back.register_fake
def _(dy: Tensor, gain: Tensor, codes: Tensor, most: Tensor, scale: Tensor, centred: bool) -> Tensor:
    return torch.empty_like(dy)
