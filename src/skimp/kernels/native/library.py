"""Load the compiled kernels through ctypes, and call them with tensors.

ctypes releases the interpreter lock during a call. Every function here takes contiguous CPU tensors of the
stated dtypes; the operators that call them have checked that.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.forms import attach
from skimp.kernels.native.build import LIBRARY, stamp
from skimp.kernels.native.tables import native_map

_i32, _i64, _ptr = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

_SIGNATURES: dict[str, list[Any]] = {
    "skimp_philox": [_ptr, _i64, _i64, _i64, _i64, _i32],
    "skimp_bf16_round": [_ptr, _ptr, _i64, _i64, _i64, _i64, _i32],
    "skimp_dynamic8_encode": [_ptr, _ptr, _ptr, _ptr, _i64, _i32, _i32],
    "skimp_dynamic8_decode": [_ptr, _ptr, _ptr, _ptr, _i64, _i32],
    "skimp_adamw8bit": [
        _ptr,
        _ptr,
        _ptr,
        _ptr,
        _i32,
        _ptr,
        _i32,
        _ptr,
        _ptr,
        _ptr,
        _ptr,
        _i64,
        _i64,
        _i64,
        _i64,
        _i32,
    ],
    "skimp_rms_norm": [_ptr, _ptr, _ptr, _ptr, _i64, _i64, ctypes.c_float, _i32],
    "skimp_rms_norm_backward": [_ptr, _ptr, _ptr, _ptr, _ptr, _ptr, _i64, _i64, _i32],
    "skimp_swiglu": [_ptr, _ptr, _ptr, _i64, _i32],
    "skimp_swiglu_backward": [_ptr, _ptr, _ptr, _ptr, _ptr, _i64, _i32],
    "skimp_rotary": [_ptr, _ptr, _ptr, _ptr, _i64, _i64, _i64, _i64, _i64, _ptr, _i32, _i32],
    "skimp_adamw_bf16": [_ptr, _ptr, _ptr, _i32, _ptr, _ptr, _i32, _i64, _i64, _i64, _i64, _i32],
}


class Scalars(ctypes.Structure):
    """`adamw_t` of the C source, in the order of `skimp.optim.adamw.Scalars`."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "beta1",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "root_bias2",
            "eps",
            "step_size",
            "decay",
        )
    )


def open_library(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """(library, "") or (None, the reason why the references run instead)."""
    how = "run `python -m skimp.kernels.native` (the references run meanwhile, with the same numbers)"
    if not path.exists():
        return None, f"not built: {how}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"cannot be loaded ({error}): {how}"
    read_stamp = getattr(library, "skimp_stamp", None)
    if read_stamp is None:
        return None, f"not a skimp library: {how}"
    read_stamp.restype = ctypes.c_char_p
    if read_stamp() != stamp().encode():
        return None, f"built from another source, with other flags or for another CPU: {how}"
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library, ""


@cache
def _opened() -> tuple[ctypes.CDLL | None, str]:
    return open_library(LIBRARY)


def available() -> bool:
    """True when the native kernels are built for this source and CPU, and loaded."""
    return _opened()[0] is not None


def why() -> str:
    """Why they are not available; empty when they are."""
    return _opened()[1]


def load() -> bool:
    """Attach the native forms to their operators (`skimp.core.forms`); idempotent. Returns `available()`."""
    if not available():
        return False
    attach("philox", philox)
    attach("bf16_stochastic_round", bf16_stochastic_round)
    attach("dynamic8_encode", dynamic8_encode)
    attach("dynamic8_decode", dynamic8_decode)
    attach("adamw8bit", adamw8bit)
    attach("adamw_bf16", adamw_bf16)
    return True


def _library() -> ctypes.CDLL:
    library, reason = _opened()
    if library is None:
        raise RuntimeError(f"native kernels called although {reason}")
    return library


def philox(out: Tensor, key: int, stream: int, offset: int) -> None:
    """Fill `out` (n,) int64 with numbers offset … offset + n of a stream."""
    _library().skimp_philox(out.data_ptr(), key, stream, offset, out.numel(), torch.get_num_threads())


def bf16_stochastic_round(x: Tensor, out: Tensor, key: int, stream: int, offset: int) -> None:
    """`x` float32 → `out` bf16, same shape."""
    _library().skimp_bf16_round(x.data_ptr(), out.data_ptr(), key, stream, offset, x.numel(), torch.get_num_threads())


def dynamic8_encode(x: Tensor, codes: Tensor, absmax: Tensor, signed: bool, keep_sign: bool) -> None:
    """`x` float32 → `codes` uint8, `absmax` float32 (⌈n/256⌉,)."""
    _library().skimp_dynamic8_encode(
        _at(signed),
        x.data_ptr(),
        codes.data_ptr(),
        absmax.data_ptr(),
        x.numel(),
        int(keep_sign),
        torch.get_num_threads(),
    )


def dynamic8_decode(codes: Tensor, absmax: Tensor, out: Tensor, signed: bool) -> None:
    """The way back, to float32."""
    _library().skimp_dynamic8_decode(
        _at(signed),
        codes.data_ptr(),
        absmax.data_ptr(),
        out.data_ptr(),
        codes.numel(),
        torch.get_num_threads(),
    )


def adamw8bit(
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
    """One step in place; `p` and `g` float32 or bf16, states as in `skimp.optim.adamw8bit`; noise from `offset`."""
    _library().skimp_adamw8bit(
        _at(True),
        _at(False),
        ctypes.byref(Scalars(*scalars)),
        p.data_ptr(),
        int(p.dtype == torch.bfloat16),
        g.data_ptr(),
        int(g.dtype == torch.bfloat16),
        m.data_ptr(),
        m_absmax.data_ptr(),
        v.data_ptr(),
        v_absmax.data_ptr(),
        p.numel(),
        key,
        step,
        offset,
        torch.get_num_threads(),
    )


def adamw_bf16(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, scalars: tuple[float, ...], key: int, step: int, offset: int
) -> None:
    """One step in place; `p` bf16, `g` float32 or bf16, `m` and `v` both float32 or both bf16; noise from `offset`."""
    _library().skimp_adamw_bf16(
        ctypes.byref(Scalars(*scalars)),
        p.data_ptr(),
        g.data_ptr(),
        int(g.dtype == torch.bfloat16),
        m.data_ptr(),
        v.data_ptr(),
        int(m.dtype == torch.bfloat16),
        p.numel(),
        key,
        step,
        offset,
        torch.get_num_threads(),
    )


def rms_norm(x: Tensor, weight: Tensor, y: Tensor, scale: Tensor, eps: float) -> None:
    """`x` (…, n) → `y` alike and `scale` (…,), all float32 and contiguous."""
    width = x.shape[-1]
    _library().skimp_rms_norm(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), scale.data_ptr(), x.numel() // width, width, eps,
        torch.get_num_threads(),
    )  # fmt: skip


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, dx: Tensor, dw: Tensor | None) -> None:
    """Gradients of x and, unless None, of weight."""
    width = x.shape[-1]
    _library().skimp_rms_norm_backward(
        dy.data_ptr(), x.data_ptr(), weight.data_ptr(), scale.data_ptr(), dx.data_ptr(),
        None if dw is None else dw.data_ptr(), x.numel() // width, width, torch.get_num_threads(),
    )  # fmt: skip


def swiglu(gate: Tensor, up: Tensor, y: Tensor) -> None:
    """silu(gate) * up, all of one shape, float32 and contiguous."""
    _library().skimp_swiglu(gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel(), torch.get_num_threads())


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Gradients of gate and up."""
    _library().skimp_swiglu_backward(
        dy.data_ptr(), gate.data_ptr(), up.data_ptr(), dgate.data_ptr(), dup.data_ptr(), gate.numel(),
        torch.get_num_threads(),
    )  # fmt: skip


def rotary(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Rotate `x` (rows, heads, seq, dim) into `y`, both with a dense last dimension; angles (1 or rows, seq, dim)."""
    rows, heads, seq, dim = x.shape
    strides = (ctypes.c_int64 * 6)(*x.stride()[:3], *y.stride()[:3])
    _library().skimp_rotary(
        x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, seq, dim,
        seq * dim if cos.shape[0] > 1 else 0, ctypes.addressof(strides), int(inverse), torch.get_num_threads(),
    )  # fmt: skip


def _at(signed: bool) -> Any:
    return ctypes.byref(native_map(signed))
