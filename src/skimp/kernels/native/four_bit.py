"""The native form of 4-bit AdamW: one more C file, in a library of its own.

Its source includes that of the other kernels, so it needs a C compiler and the same flags; it is rebuilt when either
source changes. Without it the torch reference runs and gives the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from skimp.core.forms import attach
from skimp.kernels.native.beside import Beside
from skimp.kernels.native.library import Scalars
from skimp.kernels.native.tables import native_map4

_i32, _i64, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_ADAMW4BIT: list[Any] = [
    *[_ptr, _ptr, _ptr, _i32, _ptr, _i32, _ptr, _ptr, _ptr, _ptr],
    *[_i64, _i64, _i64, _i64, _i32],
]
FOUR_BIT = Beside("4-bit AdamW", "four_bit", {"skimp_adamw4bit": _ADAMW4BIT})


def load() -> bool:
    """Attach the native form; idempotent. Returns whether there is one."""
    library = FOUR_BIT.opened
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
