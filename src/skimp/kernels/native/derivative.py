"""The native form of derivative-coded activations: one more C file, in a library of its own.

Without it the torch references run: codes of derivatives are the same bits, norms
and gated products agree to a few ulp before they are coded.
"""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skimp.kernels.native.beside import Beside

#: Numbers of a block that share a scale, and edges of a derivative's cells at most, as in the source.
BLOCK, MOST_EDGES = 64, 48

_i32, _i64, _f32, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
DERIVATIVE = Beside(
    "coded derivatives",
    "derivative",
    {
        "skimp_derivative_code": [*[_ptr] * 3, _i64, _i32],
        "skimp_derivative_back": [*[_ptr] * 4, _i64, _i32],
        "skimp_gated_code": [*[_ptr] * 9, _i64, _i64, _i32, _i32],
        "skimp_gated_back": [*[_ptr] * 10, _i64, _i64, _i32],
        "skimp_norm_code": [*[_ptr] * 5, _i64, _i64, _f32, _i32, _i32],
        "skimp_norm_back": [*[_ptr] * 7, _i64, _i64, _i32, _i32],
    },
)


class Cells(ctypes.Structure):
    """`cells_t` of the source."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("steps", ctypes.c_int32 * MOST_EDGES),
        ("edges", _f32 * MOST_EDGES),
        ("levels", _f32 * 16),
    )


class Block(ctypes.Structure):
    """`block_t` of the source."""

    _fields_ = (("levels", _f32 * 16), ("edges", _f32 * 15))


def available() -> bool:
    """Whether the native form is built."""
    return DERIVATIVE.available()


def call(name: str, *arguments: Any) -> None:
    """One call: tensors by address, structures by reference; the number of threads is added.

    Tensors are contiguous on a CPU; which and how many is checked by whoever calls.
    """
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    getattr(DERIVATIVE, name)(*plain, torch.get_num_threads())


@cache
def cells(edges: tuple[float, ...], codes: tuple[int, ...], levels: tuple[float, ...]) -> Any:
    """A derivative's table by reference; kept, because it is used in every call."""
    steps = [after - before for before, after in pairwise(codes)]
    filled = [*levels, *[0.0] * (16 - len(levels))]
    table = Cells(
        len(edges), codes[0], (ctypes.c_int32 * MOST_EDGES)(*steps), (_f32 * MOST_EDGES)(*edges), (_f32 * 16)(*filled)
    )
    return ctypes.byref(table)


@cache
def block_map(levels: tuple[float, ...], edges: tuple[float, ...]) -> Any:
    """The block code's table by reference."""
    return ctypes.byref(Block((_f32 * 16)(*levels), (_f32 * 15)(*edges)))
