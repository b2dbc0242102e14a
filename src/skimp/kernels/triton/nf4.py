"""Products with an NF4 weight in Triton: W is decoded tile by tile into registers and never written.

y = x W' + b and dx = g W, as `core.coded` defines them, with sums in float32. Any sizes and any block: an element's
byte and block are found from its place in the flattened matrix.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from skimp.core.codecs.dynamic8_map import codebook as dynamic8
from skimp.core.codecs.nf4_map import codebook

#: A program's tile: tokens, and rows and columns of W.
TOKENS, ROWS, COLUMNS = 32, 64, 64


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 levels and the 256 entries of the dynamic map."""
    levels, dynamic = (torch.from_numpy(t.copy()).to(device) for t in (codebook(), dynamic8(True)))
    return levels, dynamic


@triton.jit
def _weights(
    codes_at, coded_at, absmax_at, offset_at, levels_at, dynamic_at, rows, columns, outputs, inputs, block,
    NESTED: tl.constexpr,
):  # fmt: skip
    """W[rows, columns] in float32, 0 outside."""
    inside = (rows[:, None] < outputs) & (columns[None, :] < inputs)
    place = rows[:, None].to(tl.int64) * inputs + columns[None, :]
    byte = tl.load(codes_at + place // 2, mask=inside, other=0).to(tl.int32)
    code = tl.where(place % 2 == 0, byte >> 4, byte & 15)
    level = tl.load(levels_at + code, mask=inside, other=0.0)
    home = place // block
    if NESTED:
        entry = tl.load(coded_at + home, mask=inside, other=0).to(tl.int32)
        most = tl.load(absmax_at + home // 256, mask=inside, other=0.0)
        scale = tl.load(dynamic_at + entry, mask=inside, other=0.0) * most + tl.load(offset_at)
    else:
        scale = tl.load(absmax_at + home, mask=inside, other=0.0)
    return tl.where(inside, level * scale, 0.0)


@triton.jit
def _product(
    x_at, codes_at, coded_at, absmax_at, offset_at, levels_at, dynamic_at, bias_at, y_at,
    tokens, outputs, inputs, block,
    NESTED: tl.constexpr, BIAS: tl.constexpr, BACK: tl.constexpr,
    TOKENS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """A tile of y = x W' + b, or with BACK of dx = x W (x is then the gradient, its width the outputs)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wide = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    reach, width = inputs, outputs
    if BACK:
        reach, width = outputs, inputs
    total = tl.zeros((TOKENS, WIDE), tl.float32)
    for start in range(0, reach, DEEP):
        along = start + deep
        there = (token[:, None] < tokens) & (along[None, :] < reach)
        x = tl.load(x_at + token[:, None].to(tl.int64) * reach + along[None, :], mask=there, other=0.0).to(tl.float32)
        if BACK:
            w = _weights(
                codes_at, coded_at, absmax_at, offset_at, levels_at, dynamic_at, along, wide, outputs, inputs, block,
                NESTED,
            )  # fmt: skip
        else:
            w = tl.trans(_weights(
                codes_at, coded_at, absmax_at, offset_at, levels_at, dynamic_at, wide, along, outputs, inputs, block,
                NESTED,
            ))  # fmt: skip
        total += tl.dot(x, w, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_at + wide, mask=wide < width, other=0.0).to(tl.float32)[None, :]
    inside = (token[:, None] < tokens) & (wide[None, :] < width)
    at = y_at + token[:, None].to(tl.int64) * width + wide[None, :]
    tl.store(at, total.to(y_at.dtype.element_ty), mask=inside)


def product(
    x: Tensor, codes: Tensor, absmax: list[Tensor], block: int, shape: tuple[int, int], bias: Tensor | None = None
) -> Tensor:
    """x W' + b for x (tokens, inputs), float32 or half: (tokens, outputs) in x's dtype.

    Args:
        codes, absmax: parts of the NF4 codec: [maxima], or [their codes, maxima of those, offset].
        shape: (outputs, inputs).
    """
    return _launch(x, codes, absmax, block, shape, bias, back=False)


def product_back(g: Tensor, codes: Tensor, absmax: list[Tensor], block: int, shape: tuple[int, int]) -> Tensor:
    """g W for g (tokens, outputs): (tokens, inputs) in g's dtype."""
    return _launch(g, codes, absmax, block, shape, None, back=True)


def _launch(
    x: Tensor,
    codes: Tensor,
    absmax: list[Tensor],
    block: int,
    shape: tuple[int, int],
    bias: Tensor | None,
    back: bool,
) -> Tensor:
    x, (outputs, inputs) = x.contiguous(), shape
    width, nested = inputs if back else outputs, len(absmax) > 1
    y = x.new_empty(x.shape[0], width)
    levels, dynamic = _tables(x.device)
    coded, maxima, offset = absmax if nested else (codes, absmax[0], absmax[0])
    grid = (triton.cdiv(x.shape[0], TOKENS), triton.cdiv(width, COLUMNS if back else ROWS))
    _product[grid](
        x, codes, coded, maxima, offset, levels, dynamic, x if bias is None else bias, y,
        x.shape[0], outputs, inputs, block,
        NESTED=nested, BIAS=bias is not None, BACK=back,
        TOKENS=TOKENS, WIDE=COLUMNS if back else ROWS, DEEP=ROWS if back else COLUMNS,
    )  # fmt: skip
    return y
