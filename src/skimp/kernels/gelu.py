"""GELU, and GELU times a second input (GeGLU), in one pass each way, keeping only what goes in.

What they save: GPT-2's activation is written out in HF's models, and keeps about five tensors of the MLP's width for
backward; this one keeps its input. Gemma's gate keeps gelu(gate) beside gate and up; this one gate and up. Exact, the
same mathematics a few ulp apart.

gelu(x) = x P(x). Exact form: P is the normal distribution, dgelu = P + x p(x), p its density. By tanh: P = (1 + tanh
z) / 2 = 1 / (1 + exp(-2z)), z = (2 / pi)^1/2 (x + 0.044715 x^3), dgelu = P + x P (1 - P) 2 z'.

Sources: "Gaussian Error Linear Units", 2016, arXiv 1606.08415; "GLU Variants Improve Transformer", 2020, arXiv
2002.05202; fused as in "Liger Kernel", 2024, arXiv 2410.10989, section 3.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from skimp.core.remake import can_be_remade
from skimp.kernels.native import layers
from skimp.kernels.widened import narrowed, wide


@torch.library.custom_op("skimp::gelu", mutates_args=())
def _gelu(x: Tensor, by_tanh: bool) -> Tensor:
    y = torch.empty_like(x)
    layers.gelu(x, None, y, by_tanh)
    return y


@_gelu.register_fake
def _(x: Tensor, by_tanh: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("skimp::gelu_backward", mutates_args=())
def _gelu_backward(dy: Tensor, x: Tensor, by_tanh: bool) -> Tensor:
    dx = torch.empty_like(x)
    layers.gelu_backward(dy, x, None, dx, None, by_tanh)
    return dx


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, by_tanh: bool) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("skimp::geglu", mutates_args=())
def _geglu(gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
    y = torch.empty_like(gate)
    layers.gelu(gate, up, y, by_tanh)
    return y


@_geglu.register_fake
def _(gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
    return torch.empty_like(gate)


@torch.library.custom_op("skimp::geglu_backward", mutates_args=())
def _geglu_backward(dy: Tensor, gate: Tensor, up: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    layers.gelu_backward(dy, gate, up, dgate, dup, by_tanh)
    return dgate, dup


@_geglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, by_tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by_tanh: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.by_tanh = by_tanh
        return narrowed(torch.ops.skimp.gelu(wide(x), by_tanh), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return narrowed(torch.ops.skimp.gelu_backward(wide(dy.contiguous()), wide(x), ctx.by_tanh), x.dtype), None


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.by_tanh = by_tanh
        return narrowed(torch.ops.skimp.geglu(wide(gate), wide(up), by_tanh), gate.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.ops.skimp.geglu_backward(wide(dy.contiguous()), wide(gate), wide(up), ctx.by_tanh)
        return narrowed(dgate, gate.dtype), narrowed(dup, up.dtype), None


def _gelu_again(x: Tensor, by_tanh: bool) -> Tensor:
    return narrowed(torch.ops.skimp.gelu(wide(x), by_tanh), x.dtype)


def _geglu_again(gate: Tensor, up: Tensor, by_tanh: bool) -> Tensor:
    return narrowed(torch.ops.skimp.geglu(wide(gate), wide(up), by_tanh), gate.dtype)


def gelu(x: Tensor, by_tanh: bool = False) -> Tensor:
    """x times the normal distribution at x, or its approximation by tanh; any shape, float32 or bfloat16 on a CPU.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _GELU.apply(x, by_tanh)  # type: ignore[no-untyped-call]
    return can_be_remade(y, partial(_gelu_again, by_tanh=by_tanh), x)


def geglu(gate: Tensor, up: Tensor, by_tanh: bool = False) -> Tensor:
    """gelu(gate) * up, both of one shape, float32 or bfloat16 on a CPU.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    y: Tensor = _GeGLU.apply(gate, up, by_tanh)  # type: ignore[no-untyped-call]
    return can_be_remade(y, partial(_geglu_again, by_tanh=by_tanh), gate, up)


def gelu_reference(x: Tensor, by_tanh: bool = False) -> Tensor:
    """The plain form, in any float dtype."""
    if by_tanh:
        return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))
    return 0.5 * x * torch.erfc(-x * 0.5**0.5)


def geglu_reference(gate: Tensor, up: Tensor, by_tanh: bool = False) -> Tensor:
    """The plain form, in any float dtype."""
    return gelu_reference(gate, by_tanh) * up
