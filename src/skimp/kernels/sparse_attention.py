"""Attention over the key blocks of a pattern, forward and backward; the other blocks cost neither time nor memory.

Keeps what flash attention keeps: queries, keys, values, the output and one float a row and head. Backward makes a key
and a value gradient for every query head and sums them over groups: 2 x rows x heads x seq x dim x 4 bytes meanwhile.

Source: "S2-Attention", 2024, arXiv 2407.17678, section 4, whose kernel this is not: see `native/skimp_sparse.c`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from skimp.kernels.block_pattern import BlockPattern
from skimp.kernels.native import sparse
from skimp.kernels.widened import narrowed, wide


def _pattern(heads: int, numbers: list[int]) -> BlockPattern:
    block, local, stride, offset, dense = numbers
    return BlockPattern(heads, block, local, stride or None, offset, dense)


def visited(heads: int, seq: int, numbers: list[int]) -> float:
    """Keys that a query of `seq` visits on average, in whole blocks."""
    pattern = _pattern(heads, numbers)
    blocks = -(-seq // pattern.block)
    return pattern.visited(blocks) * pattern.block / (heads * blocks)


def _like(x: Tensor, heads: int) -> Tensor:
    """(rows, heads, seq, dim), laid out (rows, seq, heads, dim) in memory, so the reshape after attention is free."""
    rows, _, seq, dim = x.shape
    return x.new_empty(rows, seq, heads, dim).transpose(1, 2)


@torch.library.custom_op("skimp::sparse_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, numbers: list[int]) -> tuple[Tensor, Tensor]:
    pattern = _pattern(k.shape[1], numbers)
    out, lse = _like(q, q.shape[1]), q.new_empty(q.shape[:3])
    starts, columns = pattern.listed(-(-q.shape[2] // pattern.block))
    sparse.sparse(q, k, v, out, lse, starts, columns, pattern.block, scale)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, numbers: list[int]) -> tuple[Tensor, Tensor]:
    return _like(q, q.shape[1]), q.new_empty(q.shape[:3])


@torch.library.custom_op("skimp::sparse_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    pattern = _pattern(k.shape[1], numbers)
    dq, dk, dv = (_like(q, q.shape[1]) for _ in range(3))
    starts, columns = pattern.listed(-(-q.shape[2] // pattern.block))
    sparse.sparse_backward(dout, q, k, v, out, lse, dq, dk, dv, starts, columns, pattern.block, scale)
    return dq, dk, dv


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, numbers: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q, q.shape[1]), _like(q, q.shape[1]), _like(q, q.shape[1])


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, numbers: list[int]) -> Tensor:
        out, lse = torch.ops.skimp.sparse_attention(q, k, v, scale, numbers)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.numbers = scale, numbers
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dq, dk, dv = torch.ops.skimp.sparse_attention_backward(dout, q, k, v, out, lse, ctx.scale, ctx.numbers)
        group = q.shape[1] // k.shape[1]
        if group > 1:
            dk, dv = (t.unflatten(1, (k.shape[1], group)).sum(2) for t in (dk, dv))
        return dq, dk, dv, None, None


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float | None = None) -> Tensor:
    """Causal attention over the blocks of `pattern`.

    Args:
        q: (rows, heads, seq, dim) float32 or bfloat16 on a CPU. k, v: the same with `pattern.heads` heads, a divisor.
        scale: of the scores; None for dim^-1/2.

    Returns:
        Shape and dtype of q, laid out (rows, seq, heads, dim) in memory.

    Raises:
        RuntimeError: the native kernels are not built.
    """
    dim = q.shape[3]
    by = dim**-0.5 if scale is None else scale
    extra = -dim % 16
    given = [wide(t) for t in (q, k, v)]
    given = [pad(t, (0, extra)) if extra else t if t.stride(3) == 1 else t.contiguous() for t in given]
    numbers = [pattern.block, pattern.local, pattern.stride or 0, pattern.offset, pattern.dense_heads]
    out: Tensor = _Sparse.apply(*given, by, numbers)  # type: ignore[no-untyped-call]
    return narrowed(out[..., :dim] if extra else out, q.dtype)


def sparse_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float | None = None
) -> Tensor:
    """The plain form on whole scores, in any float dtype: seq x seq numbers a head."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    mask = pattern.mask(q.shape[2]).to(q.device).repeat_interleave(group, 0)
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v
