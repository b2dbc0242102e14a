"""The native form of 4-bit AdamW: one more C file, in a library of its own.

Its source includes that of the other kernels, so it needs a C compiler and the same flags; it is rebuilt when either
source changes. Without it the torch reference runs and gives the same bits.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.forms import attach
from skimp.kernels.native import build
from skimp.kernels.native.build import FLAGS, LINK_FLAGS, compile_aside, hashed
from skimp.kernels.native.library import Scalars
from skimp.kernels.native.tables import native_map4

SOURCE = Path(__file__).with_name("skimp_four_bit.c")
LIBRARY = Path(__file__).with_name("skimp_four_bit.so")

_i32, _i64, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_ADAMW4BIT: list[Any] = [
    *[_ptr, _ptr, _ptr, _i32, _ptr, _i32, _ptr, _ptr, _ptr, _ptr],
    *[_i64, _i64, _i64, _i64, _i32],
]


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
        raise SkimpError("a C compiler for 4-bit AdamW", "none of $CC, cc, gcc, clang", instead="install gcc or clang")
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
    library.skimp_adamw4bit.argtypes, library.skimp_adamw4bit.restype = _ADAMW4BIT, None
    return library


def load() -> bool:
    """Attach the native form; idempotent. Returns whether there is one."""
    library = opened()
    if library is None:
        return False

    def adamw4bit(
        p: Tensor,
        g: Tensor,
        m: Tensor,
        m_absmax: Tensor,
        v: Tensor,
        v_absmax: Tensor,
        scalars: tuple[float, ...],
        key: int,
        step: int,
        offset: int,
    ) -> None:
        library.skimp_adamw4bit(
            ctypes.byref(native_map4()), ctypes.byref(Scalars(*scalars)), p.data_ptr(), int(p.dtype == torch.bfloat16),
            g.data_ptr(), int(g.dtype == torch.bfloat16), m.data_ptr(), m_absmax.data_ptr(), v.data_ptr(),
            v_absmax.data_ptr(), p.numel(), key, step, offset, torch.get_num_threads(),
        )  # fmt: skip

    attach("adamw4bit", adamw4bit)
    return True
