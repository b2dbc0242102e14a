"""Token embedding whose weight gradient goes straight into a buffer that the head fills as well.

Saves 4 V H bytes: with a tied matrix autograd makes one dense V x H gradient for the embedding and one for
the head and adds them, so two exist at once (113 MB more for 49152 x 576). Here both are added to one buffer.
Exact.

The gradient of y = E[ids] is, for every row v, the sum of dy over the positions where ids = v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.losses.head_arguments import refuse_double


def tied_embedding(ids: Tensor, weight: Tensor, weight_grad_into: Tensor, padding_idx: int | None = None) -> Tensor:
    """`F.embedding(ids, weight)`, with the gradient of `weight` added to a buffer in backward.

    Args:
        ids: (...) int64. weight: (V, H). weight_grad_into: (V, H), float32 or the weight's dtype.
        padding_idx: this row gets no gradient, as in `nn.Embedding`.

    Returns:
        (..., H) in the weight's dtype. It requires grad whenever the weight does, so the graph reaches it;
        the weight itself receives None from autograd. Every backward through it adds once, also inside
        recomputed regions (the forward writes nothing). A gradient in lower precision than the buffer is
        widened first (4 bytes per element of dy). On the CPU the sum runs in the order of the positions and
        is bit-equal from run to run; on CUDA only under `torch.use_deterministic_algorithms(True)`.

    Raises:
        SkimpError: the buffer does not match the weight.
    """
    if weight_grad_into.shape != weight.shape or weight_grad_into.device != weight.device:
        raise SkimpError(
            f"weight_grad_into of shape {tuple(weight.shape)} on {weight.device}",
            f"{tuple(weight_grad_into.shape)} on {weight_grad_into.device}",
            instead="torch.zeros_like(weight, dtype=torch.float32)",
        )
    rows: Tensor = _Embedding.apply(ids, weight, weight_grad_into, padding_idx)  # type: ignore[no-untyped-call]
    return rows


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, into: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.into, ctx.padding_idx = into, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, ...]:
        refuse_double()
        (ids,) = ctx.saved_tensors
        flat = upstream.reshape(-1, upstream.shape[-1])
        if flat.dtype != ctx.into.dtype:
            flat = flat.to(ctx.into.dtype)
        if ctx.padding_idx is not None:
            flat = flat.masked_fill(ids.reshape(-1, 1).eq(ctx.padding_idx), 0.0)
        ctx.into.index_add_(0, ids.reshape(-1), flat)
        return None, None, None, None
