"""Cross-entropy of logits in two passes forward and one backward, the gradient over the logits if they may go.

Plain autograd keeps the log-softmax, tokens x vocabulary, and makes its gradient beside it; this one keeps the logits,
which are there anyway, and one number a row, and with `overwrite` writes the gradient where the logits were.

    loss_i = w_i (lse - (1 - e) x_y - (e / V) sum_v x_v + z lse^2),  x = k tanh(x / k) first under a soft-cap k
    dx_v   = w_i (p_v (1 + 2 z lse) - e / V - (1 - e) 1[v = y]),     times 1 - tanh^2 under the cap

The target's own number is formed apart and rounded once: p_y - 1 of a sure token would cancel in half precision.

Sources: "Liger Kernel", 2024, arXiv 2410.10989, section 3.2; z-loss: PaLM, arXiv 2204.02311, section 5; soft-cap:
Gemma 2, arXiv 2408.00118, section 2. For a head, use `skimp.losses.linear_cross_entropy`: it never holds the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.batch import IGNORE
from skimp.core.errors import SkimpError
from skimp.kernels.native import layers
from skimp.kernels.widened import narrowed, wide


@torch.library.custom_op("skimp::cross_entropy", mutates_args=())
def _cross_entropy(x: Tensor, labels: Tensor, cap: float, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    loss, lse = x.new_empty(x.shape[0]), x.new_empty(x.shape[0])
    layers.cross_entropy(x, labels, loss, lse, cap, smoothing, z_loss)
    return loss, lse


@_cross_entropy.register_fake
def _(x: Tensor, labels: Tensor, cap: float, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0]), x.new_empty(x.shape[0])


@torch.library.custom_op("skimp::cross_entropy_backward_", mutates_args=("dx",))
def _cross_entropy_backward(
    x: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, dx: Tensor, cap: float, smoothing: float, z_loss: float
) -> None:
    layers.cross_entropy_backward(x, labels, lse, upstream, dx, cap, smoothing, z_loss)


@_cross_entropy_backward.register_fake
def _(
    x: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, dx: Tensor, cap: float, smoothing: float, z_loss: float
) -> None:
    return None


class NativeRows:
    """What a form gives: values forward, gradients into a tensor of the logits' shape. This one is C."""

    @staticmethod
    def forward(x: Tensor, labels: Tensor, cap: float, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
        """(N, V) float32 logits → unweighted losses and log-sum-exps, (N,) float32."""
        loss, lse = torch.ops.skimp.cross_entropy(x, labels, cap, smoothing, z_loss)
        return loss, lse

    @staticmethod
    def backward(
        x: Tensor, labels: Tensor, lse: Tensor, upstream: Tensor, dx: Tensor, cap: float, smoothing: float, z: float
    ) -> None:
        """`dx` is written; it may be `x` itself."""
        if dx.data_ptr() == x.data_ptr():  # one name for one storage: an operator may not be told otherwise
            layers.cross_entropy_backward(x, labels, lse, upstream, dx, cap, smoothing, z)
        else:
            torch.ops.skimp.cross_entropy_backward_(x, labels, lse, upstream, dx, cap, smoothing, z)


class CrossEntropy(torch.autograd.Function):
    """Weighted losses a token, of a form's rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, weights: Tensor, form: Any, options: tuple[float, float, float],
        overwrite: bool,
    ) -> Tensor:  # fmt: skip
        loss, lse = form.forward(wide(x), labels, *options)
        ctx.save_for_backward(x, labels, weights, lse)
        ctx.form, ctx.options, ctx.overwrite = form, options, overwrite
        result: Tensor = loss * weights
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, weights, lse = ctx.saved_tensors  # raises where an overwritten x is asked for a second time
        logits = wide(x)
        over = ctx.overwrite and x.dtype == torch.float32
        dx = x.detach() if over else logits if logits is not x else torch.empty_like(logits)
        ctx.form.backward(logits, labels, lse, (upstream * weights).contiguous(), dx, *ctx.options)
        if over:
            torch.autograd.graph.increment_version(x)
        return narrowed(dx, x.dtype), None, None, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE,
    overwrite: bool = False,
    form: Any = NativeRows,
) -> Tensor:
    """Losses a token, each times its weight.

    Args:
        logits: (N, V) float32 or bfloat16. labels: (N,) int64; `ignore_index` has loss and gradient 0.
        weights: (N,) per token, no gradient to them; None for ones.
        label_smoothing, z_loss, softcap: see the formulas of this module.
        overwrite: the gradient is written over float32 logits in backward, which are lost then: a second backward, or
            another reader of them, raises as for every tensor that was changed in place. Without grad nothing is.
        form: `NativeRows`, or another form's (`skimp.kernels.triton.cross_entropy.TritonRows`).

    Returns:
        (N,) float32.

    Raises:
        SkimpError: shapes that do not go together.
        RuntimeError: the native kernels are not built.
    """
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise SkimpError(
            "logits (N, V) and int64 labels (N,)",
            f"{tuple(logits.shape)} and {tuple(labels.shape)}, {labels.dtype}",
            instead="logits.flatten(0, -2) and labels.flatten()",
        )
    ignored = labels.eq(ignore_index)
    kept = ignored.logical_not().to(torch.float32)
    scale = kept if weights is None else weights.detach().float().masked_fill(ignored, 0.0)
    options = (softcap or 0.0, float(label_smoothing), float(z_loss))
    safe = labels.masked_fill(ignored, 0)
    losses: Tensor = CrossEntropy.apply(logits.contiguous(), safe, scale, form, options, overwrite)  # type: ignore[no-untyped-call]
    return losses


def log_probs(logits: Tensor, labels: Tensor, softcap: float | None = None, form: Any = NativeRows) -> Tensor:
    """log p(label) of each row, (N,) float32; as `cross_entropy`, without a copy of the log-softmax."""
    return -cross_entropy(logits, labels, softcap=softcap, form=form)


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE,
) -> Tensor:
    """The plain form, in any float dtype."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    ignored = labels == ignore_index
    lse = torch.logsumexp(x, -1)
    target = x.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1 - label_smoothing) * target - label_smoothing * x.mean(-1) + z_loss * lse**2
    if weights is not None:
        loss = loss * weights
    return loss.masked_fill(ignored, 0.0)


def log_probs_reference(logits: Tensor, labels: Tensor, softcap: float | None = None) -> Tensor:
    """The plain form, in any float dtype."""
    return -cross_entropy_reference(logits, labels, softcap=softcap)
