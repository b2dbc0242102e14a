"""The native forms of NF4: encoding, decoding, and the product with a few rows. Contiguous tensors on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.dynamic8_map import codebook as dynamic8
from skimp.core.codecs.nf4_map import codebook, midpoints
from skimp.core.forms import attach
from skimp.core.read import read
from skimp.kernels.native.beside import Beside

_i32, _i64, _ptr, _f32 = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float

NF4 = Beside(
    "the NF4 kernels",
    "nf4",
    {
        "skimp_nf4_encode": [*[_ptr] * 4, _i64, _i64, _i32],
        "skimp_nf4_decode": [*[_ptr] * 4, _f32, _i64, _i64, _i64, _ptr, _i32, _i32],
        "skimp_nf4_few": [*[_ptr] * 4, _f32, _i64, _ptr, _ptr, _ptr, _i64, _i64, _i64, _i32],
    },
)


class Map(ctypes.Structure):
    """`nf4_t` of the C source."""

    _fields_ = (("levels", _f32 * 16), ("borders", _f32 * 15), ("dynamic", _ptr))


@cache
def native_map() -> Map:
    """The tables; the dynamic map is a bare pointer into an array that is cached for the life of the process."""
    levels, borders = codebook().tolist(), midpoints().tolist()  # host value: numpy
    return Map((_f32 * 16)(*levels), (_f32 * 15)(*borders), dynamic8(True).ctypes.data)


def load() -> bool:
    """Attach the native forms; idempotent. Returns whether there are any."""
    if not NF4.available():
        return False
    attach("nf4_encode", encode)
    attach("nf4_decode", decode)
    attach("nf4_few", few)
    return True


def encode(x: Tensor, codes: Tensor, absmax: Tensor, block: int) -> None:
    """`x` (n,) float32 → `codes` (⌈n/2⌉,) uint8, `absmax` (⌈n/block⌉,) float32."""
    NF4.skimp_nf4_encode(
        ctypes.byref(native_map()), x.data_ptr(), codes.data_ptr(), absmax.data_ptr(), x.numel(), block,
        torch.get_num_threads(),
    )  # fmt: skip


def decode(codes: Tensor, absmax: list[Tensor], block: int, first: int, out: Tensor) -> None:
    """Elements from `first` on into `out` (n,), float32 or bf16."""
    NF4.skimp_nf4_decode(
        ctypes.byref(native_map()), codes.data_ptr(), *_sides(absmax), block, first, first + out.numel(),
        out.data_ptr(), int(out.dtype == torch.bfloat16), torch.get_num_threads(),
    )  # fmt: skip


def few(x: Tensor, codes: Tensor, absmax: list[Tensor], block: int, bias: Tensor | None, y: Tensor) -> None:
    """y (rows, outputs) = x W' + bias; `x` (rows, 2, inputs / 2): even columns, then odd ones."""
    rows, outputs = y.shape
    NF4.skimp_nf4_few(
        ctypes.byref(native_map()), codes.data_ptr(), *_sides(absmax), block, x.data_ptr(),
        None if bias is None else bias.data_ptr(), y.data_ptr(), rows, x.numel() // rows, outputs,
        torch.get_num_threads(),
    )  # fmt: skip


def _sides(absmax: list[Tensor]) -> tuple[Any, int, float]:
    """Coded maxima or nothing, maxima, offset."""
    if len(absmax) == 1:
        return None, absmax[0].data_ptr(), 0.0
    return absmax[0].data_ptr(), absmax[1].data_ptr(), read(absmax[2], expect=0.0)
