"""The native form of derivative-coded activations: one more C file, in a library of its own.

Built and stamped as `four_bit` is. Without it the torch references run: codes of derivatives are the same bits, norms
and gated products agree to a few ulp before they are coded.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.kernels.native import build
from skimp.kernels.native.build import FLAGS, LINK_FLAGS, compile_aside, hashed

SOURCE = Path(__file__).with_name("skimp_derivative.c")
LIBRARY = Path(__file__).with_name("skimp_derivative.so")

#: Numbers of a block that share a scale, and edges of a derivative's cells at most, as in the source.
BLOCK, MOST_EDGES = 64, 48

_i32, _i64, _f32, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "skimp_derivative_code": [*[_ptr] * 3, _i64, _i32],
    "skimp_derivative_back": [*[_ptr] * 4, _i64, _i32],
    "skimp_gated_code": [*[_ptr] * 9, _i64, _i32, _i32],
    "skimp_gated_back": [*[_ptr] * 10, _i64, _i32],
    "skimp_norm_code": [*[_ptr] * 5, _i64, _i64, _f32, _i32, _i32],
    "skimp_norm_back": [*[_ptr] * 7, _i64, _i64, _i32, _i32],
}


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


def stamp() -> str:
    """Hash of both sources, flags and CPU."""
    sources = [path.read_text(encoding="utf-8") for path in (build.SOURCE, SOURCE)]
    return hashed(*sources, *FLAGS, *LINK_FLAGS, platform.machine(), build.cpu_features())


def make(target: Path = LIBRARY) -> Path:
    """Compile to `target`.

    Raises:
        SkimpError: no compiler, a folder that cannot be written, or the compiler's own message.
    """
    found = build.compiler()
    if found is None:
        raise SkimpError("a C compiler for coded derivatives", "none of $CC, cc, gcc, clang", instead="install gcc")
    command = [found, *FLAGS, f'-DSKIMP_STAMP="{stamp()}"', "-c", str(SOURCE)]
    return compile_aside(SOURCE, command, LINK_FLAGS, target)


@cache
def opened() -> ctypes.CDLL | None:
    """The library, None where it is not built for these sources and this CPU."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    library.skimp_stamp.restype = ctypes.c_char_p
    if library.skimp_stamp() != stamp().encode():
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def available() -> bool:
    """Whether the native form is built."""
    return opened() is not None


def call(name: str, *arguments: Any) -> None:
    """One call: tensors by address, structures by reference; the number of threads is added.

    Tensors are contiguous on a CPU; which and how many is checked by whoever calls.
    """
    plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    getattr(opened(), name)(*plain, torch.get_num_threads())


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
