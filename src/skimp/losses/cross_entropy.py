"""Cross-entropy straight from hidden states: the tokens x vocabulary matrix never exists.

Saves: N V (4 logits + 4 log-softmax + 4 gradient) bytes become rows V 4 bytes; 2048 tokens of a 49152-word
vocabulary: 1208 MB become 50 MB. Exact, at the plain path's three matrix products.

Sources: Liger Kernel, arXiv 2410.10989, section 3.2 (gradient made inside the forward chunk); Cut Your
Losses, arXiv 2411.09009; z-loss: PaLM, arXiv 2204.02311, section 5; soft-cap: Gemma 2, arXiv 2408.00118,
section 2.

Per token i, with logits x = logit_scale * (h W' + b), capped to k tanh(x / k) when softcap = k, and lse = log
sum exp x:

    loss_i = lse - (1 - e) x_y - (e / V) sum_v x_v + z lse^2        e = label_smoothing, z = z_loss
    dx_v   = p_v (1 + 2 z lse) - e / V - (1 - e) 1[v = y]           (times 1 - tanh^2 under the cap)

A token weight multiplies *every* term of its token, the z term included, so that a token of weight w counts
exactly like w copies of it. The result is sum_i w_i loss_i / normaliser, ignored tokens having w = 0.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from skimp.core.batch import IGNORE
from skimp.losses.head_arguments import check_arguments, choose_compute
from skimp.losses.head_autograd import PerToken, Total
from skimp.losses.head_spec import HeadSpec, default_rows, exact_dtype


def linear_cross_entropy(
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
    chunk_rows: int | None = None,
    accumulate: Literal["float32", "weight"] = "float32",
    compute_dtype: torch.dtype | None = None,
    weight_grad_into: Tensor | None = None,
    grad_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against `labels`, a few rows at a time.

    Args:
        hidden: (N, H) or (B, S, H), any floating dtype. weight: (V, H). bias: (V,) or None.
        labels: `hidden.shape[:-1]` int64, already shifted (`Batch.labels`); `ignore_index` is not trained.
        token_weights: like labels, or None for ones; no gradient flows to them.
        normaliser: what the weighted sum is divided by under "mean". Give the trained tokens of the *whole
            optimizer step*, so that micro-batches of unequal length add up to the one large batch. None: the
            sum of the weights of this call's trained tokens (their number without weights); if that is zero,
            the loss is 0 with zero gradients.
        reduction: "mean" and "sum" form the gradients in forward. "none" returns `labels.shape` losses,
            already times their weights, and recomputes each chunk in backward (a fourth product), because the
            upstream gradient of each token is not known before.
        label_smoothing, z_loss, softcap, logit_scale: see the formulas of this module.
        chunk_rows: tokens per chunk; None applies `default_rows`. The result does not depend on it beyond
            rounding.
        accumulate: "float32" sums the weight gradient over chunks in float32: 4 V H bytes while the loop
            runs, for a bfloat16 weight 2 V H more than "weight", whose error grows with the number of chunks.
        compute_dtype: dtype of the operands of the three products. None: on the CPU float32 (bfloat16 storage
            is widened slice by slice: exact, and faster where the CPU has no bfloat16 units), elsewhere the
            autocast dtype, or the dtype of `hidden`. Logits, softmax, loss and sums are float32 always
            (float64 for float64 inputs).
        weight_grad_into: the in-place sink, (V, H) in float32 or the weight's dtype. The weight's gradient is
            *added* to it and autograd gets None for the weight, so no second V x H buffer exists: for tied
            heads (together with `tied_embedding`) and accumulation. Under "mean" and "sum" it is filled
            during this forward, so the returned loss must be the root of exactly one default
            `loss.backward()`: a second backward raises, an upstream gradient other than 1 raises (asserted on
            the device, no value is read), and re-running the forward inside a recomputed region raises. Under
            "none" the sink is filled in backward and none of this applies. Nothing is added without grad
            mode.
        grad_scale: multiplies the loss, hence all gradients: the place for a factor that may not follow the
            loss when a sink is used.

    Returns:
        A 0-d loss in float32 (float64 for float64 inputs), or `labels.shape` losses under "none".

    Raises:
        SkimpError: shapes, dtypes or options that do not go together.
        DataError: a label outside the vocabulary.
    """
    check_arguments(
        hidden,
        weight,
        labels,
        bias,
        token_weights,
        normaliser,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        chunk_rows,
        accumulate,
        weight_grad_into,
    )
    tokens, exact = labels.numel(), exact_dtype(hidden.dtype, weight.dtype)
    grads = torch.is_grad_enabled()
    grad_weight = grads and weight.requires_grad
    into_dtype = weight_grad_into.dtype if weight_grad_into is not None else None
    spec = HeadSpec(
        tokens,
        weight.shape[1],
        weight.shape[0],
        max(1, min(tokens, chunk_rows or default_rows(tokens, weight.shape[1], weight.shape[0]))),
        hidden.dtype,
        weight.dtype,
        exact,
        choose_compute(compute_dtype, hidden, exact),
        weight_grad_dtype=(into_dtype or (exact if accumulate == "float32" else weight.dtype)) if grad_weight else None,
        grad_hidden=grads and hidden.requires_grad,
        bias=bias is not None,
        grad_bias=grads and bias is not None and bias.requires_grad,
        smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        softcap=softcap,
        logit_scale=logit_scale,
    )
    flat = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False), torch.no_grad():
        safe, scale = prepare(labels, token_weights, ignore_index, normaliser, reduction, grad_scale, exact)
    if reduction == "none":
        per_token: Tensor = PerToken.apply(flat, weight, bias, safe, scale, spec, weight_grad_into)  # type: ignore[no-untyped-call]
        return per_token.view(labels.shape)
    total: Tensor = Total.apply(flat, weight, bias, safe, scale, spec, weight_grad_into)  # type: ignore[no-untyped-call]
    return total


def prepare(
    labels: Tensor,
    token_weights: Tensor | None,
    ignore_index: int,
    normaliser: float | int | None,
    reduction: str,
    grad_scale: float,
    exact: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(N, 1) labels safe to gather with, and (N, 1) factors w_i / normaliser, zero for ignored tokens.

    By mask arithmetic only: the sequence of operators is the same for every content of `labels`.
    """
    column = labels.reshape(-1, 1)
    ignored = column.eq(ignore_index)
    safe = column.masked_fill(ignored, 0)
    if token_weights is None:
        scale = ignored.logical_not().to(exact)
    else:
        scale = token_weights.detach().reshape(-1, 1).to(exact).masked_fill(ignored, 0.0)
    if reduction == "mean" and normaliser is None:
        total = scale.sum()
        scale.div_(total.masked_fill_(total.eq(0.0), 1.0))
    elif reduction == "mean":
        scale.div_(float(normaliser or 1.0))
    if grad_scale != 1.0:
        scale.mul_(grad_scale)
    return safe, scale
