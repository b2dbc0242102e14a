"""Attention with a sliding window or a cap on its scores, in blocks of queries, keeping no S x S matrix.

The flash call knows neither windows nor caps without a mask tensor. Here each block of `BLOCK` queries meets only
the keys it may see; scores live for one block: heads x BLOCK x keys, e.g. 8 x 128 x 4,096 x 4 B = 16.8 MB against
537 MB for the whole matrix at S = 4,096. The backward makes each block again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BLOCK = 128


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: tuple[tuple[int, ...], ...] | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention over the last `window` positions of each document (all of them for None).

    Args:
        query: (rows, heads, seq, dim); `key`, `value`: (rows, kv_heads, keys, dim), keys >= seq; queries are the last.
        documents: offsets per row, or None for one document a row.
        scale: factor on the scores; None for 1/sqrt(dim).
        window: a query sees itself and the `window - 1` positions before it.
        softcap: scores become cap * tanh(score / cap) (Gemma 2, section 2).

    Returns:
        (rows, heads, seq, dim), memory laid out as (rows, seq, heads, dim).
    """
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _Windowed.apply(query, key, value, documents, scale, window, softcap)


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Any,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        rows, heads, seq, dim = query.shape
        out = query.new_empty(rows, seq, heads, dim).transpose(1, 2)
        ctx.blocks = _blocks(documents, rows, seq, key.shape[2], window)
        ctx.rule = (scale, window, softcap)
        for block in ctx.blocks:
            q, k, v = _cut(query, key, value, block)
            probs, _ = _probabilities(q, k, block, *ctx.rule)
            row, q0, q1, _, _ = block
            out[row, :, q0:q1].copy_((probs.to(v.dtype) @ v).flatten(0, 1))
        ctx.save_for_backward(query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        scale, _, softcap = ctx.rule
        dq = torch.empty_like(query)
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        groups = query.shape[1] // key.shape[1]
        for block in ctx.blocks:
            row, q0, q1, k0, k1 = block
            q, k, v = _cut(query, key, value, block)
            probs, capped = _probabilities(q, k, block, *ctx.rule)
            g = grad[row, :, q0:q1].unflatten(0, (-1, groups))
            dv[row, :, k0:k1] += (probs.to(g.dtype).transpose(-1, -2) @ g).sum(1)
            dp = (g @ v.transpose(-1, -2)).to(probs.dtype)
            ds = probs * (dp - (dp * probs).sum(-1, keepdim=True))
            if softcap is not None:
                ds = ds * (1 - (capped / softcap).square())
            ds = (ds * scale).to(q.dtype)
            dq[row, :, q0:q1].copy_((ds @ k).flatten(0, 1))
            dk[row, :, k0:k1] += (ds.transpose(-1, -2) @ q).sum(1)
        return dq, dk, dv, None, None, None, None


def _blocks(documents: Any, rows: int, seq: int, keys: int, window: int | None) -> list[tuple[int, int, int, int, int]]:
    """(row, first query, last, first key, last) of each block; the queries are the last `seq` of `keys` positions."""
    past = keys - seq
    blocks = []
    for row in range(rows):
        offsets = documents[row] if documents is not None else (0, seq)
        for start, stop in pairwise(offsets):
            first = 0 if past else start
            for q0 in range(start, stop, BLOCK):
                q1 = min(q0 + BLOCK, stop)
                k0 = first if window is None else max(first, q0 + past - window + 1)
                blocks.append((row, q0, q1, k0, q1 + past))
    return blocks


def _cut(query: Tensor, key: Tensor, value: Tensor, block: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The block's tensors with grouped heads: q (kv, groups, n, dim), k and v (kv, 1, m, dim)."""
    row, q0, q1, k0, k1 = block
    groups = query.shape[1] // key.shape[1]
    return (
        query[row, :, q0:q1].unflatten(0, (-1, groups)),
        key[row, :, k0:k1].unsqueeze(1),
        value[row, :, k0:k1].unsqueeze(1),
    )


def _probabilities(
    q: Tensor, k: Tensor, block: Any, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax of the block's scores in at least float32, and the capped scores for the backward."""
    _, q0, q1, k0, k1 = block
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    capped = scores
    # Position of query i is k1 - (q1 - q0) + i: the block's last query sees the block's last key.
    at = torch.arange(k1 - (q1 - q0), k1, device=q.device).unsqueeze(1)
    seen = torch.arange(k0, k1, device=q.device).unsqueeze(0)
    hidden = seen > at
    if window is not None:
        hidden = hidden | (seen <= at - window)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1), capped
