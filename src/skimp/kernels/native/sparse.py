"""The native form of block-sparse attention: float32 tensors on a CPU, dense along their last dimension."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from skimp.kernels.native.beside import FUSED_PRODUCTS, Beside

_i32, _ptr, _f32 = ctypes.c_int, ctypes.c_void_p, ctypes.c_float

SPARSE = Beside(
    "block-sparse attention",
    "sparse",
    {
        "skimp_sparse": [*[_ptr] * 9, _f32, _i32],
        "skimp_sparse_backward": [*[_ptr] * 13, _f32, _i32],
    },
    FUSED_PRODUCTS,
)

#: What its thread-local buffers hold.
MOST_BLOCK, MOST_DIM = 128, 256


def _strides(*tensors: Tensor) -> Any:
    flat = [stride for t in tensors for stride in t.stride()[:3]]
    return (ctypes.c_int64 * len(flat))(*flat)


def _sizes(query: Tensor, key: Tensor, block: int) -> Any:
    rows, heads, seq, dim = query.shape
    return (ctypes.c_int64 * 6)(rows, heads, key.shape[1], seq, dim, block)


def sparse(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Any, columns: Any, block: int, scale: float
) -> None:
    """(rows, heads, seq, dim) → `out` alike and `lse` (rows, heads, seq); k and v may have fewer heads.

    Args:
        starts, columns: int32 arrays of ctypes, as `skimp.kernels.block_pattern.BlockPattern.listed`.
        block: positions of a block and `dim`, both multiples of 16.
    """
    strides, sizes = _strides(q, k, v, out), _sizes(q, k, block)  # held until the call has returned
    SPARSE.skimp_sparse(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), ctypes.addressof(starts),
        ctypes.addressof(columns), ctypes.addressof(strides), ctypes.addressof(sizes), scale, torch.get_num_threads(),
    )  # fmt: skip


def sparse_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    starts: Any, columns: Any, block: int, scale: float,
) -> None:  # fmt: skip
    """Gradients; dk and dv have a part for every query head, which the caller sums over groups."""
    strides, sizes = _strides(q, k, v, out, dout, dq, dk, dv), _sizes(q, k, block)
    SPARSE.skimp_sparse_backward(
        dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), dq.data_ptr(),
        dk.data_ptr(), dv.data_ptr(), ctypes.addressof(starts), ctypes.addressof(columns), ctypes.addressof(strides),
        ctypes.addressof(sizes), scale, torch.get_num_threads(),
    )  # fmt: skip
