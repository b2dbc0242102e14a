"""Loss and next-token accuracy in flat memory: one chunk of logits, no gradients, nothing kept.

Bytes at the peak: N (8 labels + 8 argmax + 2 e) + rows V e, with e = 4 (8 for float64 inputs), on top of the
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core.batch import IGNORE
from skimp.core.errors import SkimpError
from skimp.losses.cross_entropy import prepare
from skimp.losses.head_arguments import check_shapes, choose_compute
from skimp.losses.head_loop import HeadLoop
from skimp.losses.head_spec import HeadSpec, default_rows, exact_dtype


@torch.no_grad()
def linear_cross_entropy_eval(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | None = None,
    ignore_index: int = IGNORE,
    chunk_rows: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the trained tokens, ready to be added over batches.

    Args:
        as in `linear_cross_entropy`; no smoothing, z-loss or weights: evaluation reports the plain
        cross-entropy.

    Returns:
        (sum of losses, 0-d float32 or float64; correct predictions, 0-d int64; trained tokens, 0-d int64).
        Of equal largest logits the first counts as the prediction.

    Raises:
        SkimpError: shapes or dtypes that do not go together. DataError: a label outside the vocabulary.
    """
    check_shapes(hidden, weight, labels, bias)
    if chunk_rows is not None and chunk_rows < 1:
        raise SkimpError("chunk_rows of 1 or more, or None for the rule", f"{chunk_rows}")
    tokens, exact = labels.numel(), exact_dtype(hidden.dtype, weight.dtype)
    spec = HeadSpec(
        tokens,
        weight.shape[1],
        weight.shape[0],
        max(1, min(tokens, chunk_rows or default_rows(tokens, weight.shape[1], weight.shape[0]))),
        hidden.dtype,
        weight.dtype,
        exact,
        choose_compute(compute_dtype, hidden, exact),
        bias=bias is not None,
        softcap=softcap,
        logit_scale=logit_scale,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        safe, trained = prepare(labels, None, ignore_index, None, "sum", 1.0, exact)
        losses, predicted = torch.empty_like(trained), torch.empty_like(safe)
        wide = None if bias is None else bias.to(exact)
        HeadLoop(spec, hidden.reshape(-1, hidden.shape[-1]), weight, wide, safe).run(losses, correct=predicted)
        # An ignored label stands as 0 in `safe`, so the mask decides, not the comparison.
        right = predicted.eq(safe).logical_and_(trained.to(torch.bool))
        return torch.dot(losses.view(-1), trained.view(-1)), right.sum(), trained.to(torch.bool).sum()
