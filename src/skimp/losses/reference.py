"""The plain definition of every chunked head, on full logits: slow, readable, differentiable by autograd.

The oracle of the tests, in float64. It holds N V logits several times over; never use it to train.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from skimp.core.batch import IGNORE


def reference_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    normaliser: float | int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = IGNORE,
    grad_scale: float = 1.0,
) -> Tensor:
    """The formulas of `skimp.losses.linear_cross_entropy`, written down one after the other.

    Args and returns as there. Half-precision inputs are widened to float32 first.
    """
    wide = torch.float64 if torch.float64 in (hidden.dtype, weight.dtype) else torch.float32
    x = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        x = x + bias.to(wide)
    if logit_scale is not None:
        x = logit_scale * x
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    kept = labels != ignore_index
    safe = torch.where(kept, labels, torch.zeros_like(labels))
    lse = torch.logsumexp(x, -1)
    target = x.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    loss = (1 - label_smoothing) * (lse - target) + label_smoothing * (lse - x.mean(-1)) + z_loss * lse**2
    weights = torch.ones_like(loss) if token_weights is None else token_weights.to(wide)
    weights = torch.where(kept, weights, torch.zeros_like(weights))
    loss = grad_scale * weights * loss
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    total = weights.sum() if normaliser is None else torch.tensor(float(normaliser), dtype=wide)
    return loss.sum() / torch.where(total == 0, torch.ones_like(total), total)
