"""The native forms of LayerNorm, GELU and GeGLU, softmax and cross-entropy: contiguous float32 tensors on a CPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from skimp.core.errors import DataError
from skimp.kernels.native.beside import FUSED_PRODUCTS, Beside

_i32, _i64, _ptr, _f32 = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float

LAYERS = Beside(
    "the layer kernels",
    "layers",
    {
        "skimp_layer_norm": [*[_ptr] * 6, _i64, _i64, _f32, _i32],
        "skimp_layer_norm_backward": [*[_ptr] * 8, _i64, _i64, _i32],
        "skimp_gelu": [_ptr, _ptr, _ptr, _i64, _i32, _i32],
        "skimp_gelu_backward": [*[_ptr] * 5, _i64, _i32, _i32],
        "skimp_softmax": [_ptr, _ptr, _i64, _i64, _f32, _i32],
        "skimp_softmax_backward": [*[_ptr] * 4, _i64, _i64, _f32, _i32],
        "skimp_cross_entropy": [*[_ptr] * 5, _i64, _i64, _f32, _f32, _f32, _i32],
        "skimp_cross_entropy_backward": [*[_ptr] * 5, _i64, _i64, _f32, _f32, _f32, _i32],
    },
    FUSED_PRODUCTS,
)


def _rows(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width, width


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def layer_norm(x: Tensor, w: Tensor, b: Tensor, y: Tensor, mean: Tensor, scale: Tensor, eps: float) -> None:
    """`x` (…, n) → `y` alike, `mean` and `scale` (…,)."""
    LAYERS.skimp_layer_norm(
        _at(x), _at(w), _at(b), _at(y), _at(mean), _at(scale), *_rows(x), eps, torch.get_num_threads()
    )


def layer_norm_backward(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor, dx: Tensor, dw: Tensor | None, db: Tensor | None
) -> None:
    """Gradients of x and, unless None, of weight and bias, both or neither."""
    LAYERS.skimp_layer_norm_backward(
        _at(dy), _at(x), _at(w), _at(mean), _at(scale), _at(dx), _at(dw), _at(db), *_rows(x), torch.get_num_threads()
    )


def gelu(gate: Tensor, up: Tensor | None, y: Tensor, by_tanh: bool) -> None:
    """gelu(gate), times `up` unless None."""
    LAYERS.skimp_gelu(_at(gate), _at(up), _at(y), gate.numel(), int(by_tanh), torch.get_num_threads())


def gelu_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor, dup: Tensor | None, by_tanh: bool
) -> None:
    """Gradients of gate and, unless None, of up."""
    LAYERS.skimp_gelu_backward(
        _at(dy), _at(gate), _at(up), _at(dgate), _at(dup), gate.numel(), int(by_tanh), torch.get_num_threads()
    )


def softmax(x: Tensor, y: Tensor, cap: float) -> None:
    """Over the last dimension, of x or of cap · tanh(x / cap) where cap is above 0. `y` may be `x`."""
    LAYERS.skimp_softmax(_at(x), _at(y), *_rows(x), cap, torch.get_num_threads())


def softmax_backward(dy: Tensor, p: Tensor, x: Tensor, dx: Tensor, cap: float) -> None:
    """The gradient; x is read under a cap alone."""
    LAYERS.skimp_softmax_backward(_at(dy), _at(p), _at(x), _at(dx), *_rows(p), cap, torch.get_num_threads())


def cross_entropy(
    x: Tensor, labels: Tensor, loss: Tensor, lse: Tensor, cap: float, smoothing: float, z_loss: float
) -> None:
    """`x` (N, V), `labels` (N,) int64 → `loss` and `lse` (N,).

    Raises:
        DataError: a label outside 0 … V − 1.
    """
    wrong = ctypes.c_int32(0)
    LAYERS.skimp_cross_entropy(
        _at(x), _at(labels), _at(loss), _at(lse), ctypes.addressof(wrong), *_rows(x), cap, smoothing, z_loss,
        torch.get_num_threads(),
    )  # fmt: skip
    if wrong.value:
        raise DataError(
            f"labels within 0 .. {x.shape[-1] - 1}",
            "one outside",
            f"the head has {x.shape[-1]} rows and cannot predict another token",
            "use the tokenizer that belongs to this model, or mark the token with ignore_index",
        )


def cross_entropy_backward(
    x: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, dx: Tensor, cap: float, smoothing: float, z_loss: float
) -> None:
    """`upstream` (N,) → `dx` (N, V), which may be `x`."""
    LAYERS.skimp_cross_entropy_backward(
        _at(x), _at(labels), _at(lse), _at(upstream), _at(dx), *_rows(x), cap, smoothing, z_loss,
        torch.get_num_threads(),
    )  # fmt: skip
