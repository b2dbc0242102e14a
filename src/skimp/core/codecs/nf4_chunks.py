"""NF4 in torch, chunk by chunk: the reference of the native form, and the operator that decodes a range."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.dynamic8_map import codebook as dynamic8
from skimp.core.codecs.nf4_map import ZERO, codebook, midpoints
from skimp.core.errors import SkimpError
from skimp.core.forms import native_form
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace

#: Elements per chunk, a multiple of every block size.
CHUNK = 2**16
#: 2**8 block maxima share one of their own.
NESTED_BITS = 8
#: Rows of x at most that are multiplied by codes directly: with more, decoding once and a matrix product are faster.
FEW_ROWS = 8


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, borders and the dynamic 8-bit map on `device`, for the life of the process: 1.2 kB."""
    levels, borders, dynamic = (
        torch.from_numpy(t.copy()).to(device) for t in (codebook(), midpoints(), dynamic8(True))
    )
    return levels, borders, dynamic


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of every byte, (256,) float64 that are two float32 each: one look-up moves both."""
    levels, byte = _tables(device)[0], torch.arange(256, device=device)
    both: Tensor = torch.stack((levels[byte >> 4], levels[byte & 15]), 1).view(torch.float64).view(256)
    return both


def encode_chunk(x: Tensor, codes: Tensor, absmax: Tensor, block: int) -> None:
    """Write codes and maxima of (n,) float32 that begins at a block's border.

    Whole blocks are multiplied by the reciprocal of their maximum and a short one is divided, as bitsandbytes has it:
    at a border the two may fall to different sides. A border itself goes to the lower level.
    """
    n, (_, borders, _) = x.numel(), _tables(x.device)
    whole = n // block * block
    ratio = torch.zeros((n + 1) // 2 * 2, dtype=torch.float32, device=x.device)  # the odd one's partner decodes to 0
    if whole:
        blocks = x[:whole].view(-1, block)
        torch.amax(blocks.abs(), 1, out=absmax[: whole // block])
        inverse = absmax[: whole // block].clamp(min=1e-38).reciprocal_()
        torch.mul(blocks, inverse.unsqueeze(1), out=ratio[:whole].view(-1, block))
    if whole < n:
        most = x[whole:].abs().amax()
        absmax[-1:].copy_(most)
        torch.div(x[whole:], most.clamp(min=1e-38), out=ratio[whole:n])
    index = torch.bucketize(ratio.clamp_(-1, 1), borders, out_int32=True).to(torch.uint8)
    codes.copy_(index[0::2].bitwise_left_shift(4).bitwise_or_(index[1::2]))


def decode_range(codes: Tensor, absmax: list[Tensor], block: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Elements first:last in `dtype`, computed in float32 and rounded once.

    Args:
        codes: all of the tensor's, two a byte. absmax: [maxima], or [their 8-bit codes, maxima of those, offset].
    """
    call = _decode if unwatched(codes) else decode_op
    decoded: Tensor = call(codes, absmax, block, first, last, dtype)
    return decoded


def unwatched(tensor: Tensor) -> bool:
    """Whether no mode (a tracker, a simulation) wants to see operators: a call through the dispatcher costs 50 µs, as
    much as decoding 100,000 weights."""
    return type(tensor) is Tensor and not torch._C._len_torch_dispatch_stack() and not torch.compiler.is_compiling()


def _decode(codes: Tensor, absmax: list[Tensor], block: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(last - first, dtype=dtype, device=codes.device)
    form = native_form("nf4_decode", codes.device)
    if form is not None and dtype in (torch.float32, torch.bfloat16):
        form(codes, absmax, block, first, out)
        return out
    start = first // block * block
    scratch = Scratch(_span(start, last, block), block, len(absmax) > 1, codes.device)
    while start < last:
        # From a block's border to the chunk's end: whole blocks, the last of which may run past the codes.
        stop = min(start // CHUNK * CHUNK + CHUNK, -(-last // block) * block)
        begin, end = max(start, first), min(stop, last)
        part = out[begin - first : end - first]
        if dtype == torch.float32 and (begin, end) == (start, stop):
            _decode_chunk(codes, absmax, block, start, stop, scratch, part)
        else:
            values = scratch.values[: stop - start]
            _decode_chunk(codes, absmax, block, start, stop, scratch, values)
            part.copy_(values[begin - start : end - start])
        start = stop
    return out


decode_op = torch.library.custom_op(
    "skimp::nf4_decode",
    _decode,
    mutates_args=(),
    schema="(Tensor codes, Tensor[] absmax, int block, int first, int last, ScalarType dtype) -> Tensor",
)


class Scratch:
    """Buffers of the reference for chunks of `size` elements: 6 bytes each, and 16 a block whose maximum is coded."""

    def __init__(self, size: int, block: int, nested: bool, device: torch.device) -> None:
        self.index = torch.empty(size // 2, dtype=torch.int32, device=device)
        self.values = torch.empty(size, dtype=torch.float32, device=device)
        blocks = size // block if nested else 0
        self.which = torch.empty(2, blocks, dtype=torch.int32, device=device)
        self.scale = torch.empty(2, blocks, dtype=torch.float32, device=device)

    @staticmethod
    def nbytes(size: int, block: int, nested: bool) -> int:
        return 6 * size + (16 * (size // block) if nested else 0)


def _decode_chunk(
    codes: Tensor, absmax: list[Tensor], block: int, start: int, stop: int, s: Scratch, out: Tensor
) -> None:
    """Elements start:stop, from and to a block's border, into `out`; 0 where there are no codes."""
    dynamic, packed, size = _tables(codes.device)[2], codes[start // 2 : stop // 2], stop - start
    index, values = s.index[: size // 2], s.values[:size]
    index[: packed.numel()].copy_(packed)
    index[packed.numel() :].fill_(16 * ZERO + ZERO)
    torch.index_select(_pairs(codes.device), 0, index, out=values.view(torch.float64))
    begin, end = start // block, stop // block
    if len(absmax) == 1:
        scale = absmax[0][begin : -(-stop // block)]
    else:
        (one, two), (scale, most) = s.which[:, : end - begin], s.scale[:, : end - begin]
        torch.index_select(dynamic, 0, one.copy_(absmax[0][begin:end]), out=scale)
        torch.arange(begin, end, out=two).bitwise_right_shift_(NESTED_BITS)
        scale.mul_(torch.index_select(absmax[1], 0, two, out=most)).add_(absmax[2])
    torch.mul(values.view(-1, block), scale.unsqueeze(1), out=out.view(-1, block))


def _span(start: int, last: int, block: int) -> int:
    """Elements of the longest chunk."""
    end = -(-last // block) * block
    return min(CHUNK, end - start)


def few_rows(x: Tensor, codes: Tensor, absmax: list[Tensor], block: int, bias: Tensor | None, outputs: int) -> Tensor:
    """x W' + bias, (rows, outputs), by the native form alone; `x` (rows, 2, inputs / 2), even columns, then odd ones.

    Whole blocks in a row. Equal to decoding and multiplying but for the order of its sums.
    """
    call = _few if unwatched(codes) else few_op
    y: Tensor = call(x, codes, absmax, block, bias, outputs)
    return y


def _few(x: Tensor, codes: Tensor, absmax: list[Tensor], block: int, bias: Tensor | None, outputs: int) -> Tensor:
    y = x.new_empty(x.shape[0], outputs)
    form = native_form("nf4_few", x.device)
    if form is None:
        raise SkimpError("products from NF4 codes", "no native form", "", "python -m skimp.kernels.native")
    form(x, codes, absmax, block, bias, y)
    return y


few_op = torch.library.custom_op(
    "skimp::nf4_few",
    _few,
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor[] absmax, int block, Tensor? bias, int outputs) -> Tensor",
)


@few_op.register_fake
def _few_fake(x: Tensor, codes: Tensor, absmax: list[Tensor], block: int, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


@decode_op.register_fake
def _decode_fake(codes: Tensor, absmax: list[Tensor], block: int, first: int, last: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(last - first, dtype=dtype, device=codes.device)


@declare_workspace("skimp::nf4_decode")
def _decode_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    codes, absmax, block, first, last, dtype = args
    if first >= last or (
        dtype in (torch.float32, torch.bfloat16) and native_form("nf4_decode", codes.device) is not None
    ):
        return 0
    nested = len(absmax) > 1
    size = Scratch.nbytes(_span(first // block * block, last, block), block, nested)
    return size + (CAST_SCALAR_BYTES if nested else 0)
