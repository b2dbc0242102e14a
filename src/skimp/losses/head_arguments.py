"""What a chunked head refuses, before any work: shapes, dtypes and options that do not go together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skimp.core.errors import SkimpError


def check_arguments(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    token_weights: Tensor | None,
    normaliser: float | int | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float | None,
    chunk_rows: int | None,
    accumulate: str,
    into: Tensor | None,
) -> None:
    """Raise SkimpError on the first thing that cannot be."""
    check_shapes(hidden, weight, labels, bias)
    _check_weights(labels, token_weights)
    _check_options(reduction, normaliser, label_smoothing, z_loss, softcap, logit_scale, chunk_rows, accumulate)
    if into is not None:
        _check_sink(weight, into)


def check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    """Sizes and dtypes of the inputs of every head."""
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise SkimpError(
            "hidden (…, H) and weight (V, H)",
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}",
            "the last sizes must be equal",
            "give the weight as nn.Linear and nn.Embedding store it: vocabulary first",
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise SkimpError(
            f"labels of shape {tuple(hidden.shape[:-1])}, int64",
            f"shape {tuple(labels.shape)}, {labels.dtype}",
            "there is one label per hidden row: the token to be predicted from it",
            "shift the labels, not the hidden states, and keep both the same length (see Batch.labels)",
        )
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise SkimpError(
            "floating hidden states and weight",
            f"{hidden.dtype} and {weight.dtype}",
            instead="decode a quantised head first",
        )
    if bias is not None and bias.shape != (weight.shape[0],):
        raise SkimpError(f"bias of shape ({weight.shape[0]},)", f"{tuple(bias.shape)}")


def _check_weights(labels: Tensor, token_weights: Tensor | None) -> None:
    if token_weights is None:
        return
    if token_weights.shape != labels.shape:
        raise SkimpError(f"token_weights of shape {tuple(labels.shape)}", f"{tuple(token_weights.shape)}")
    if token_weights.requires_grad:
        raise SkimpError(
            "token_weights without gradient",
            "they require one",
            "the chunked loss gives no gradient to its weights",
            "use reduction='none' without weights and multiply the losses yourself, or detach the weights",
        )


def _check_options(
    reduction: str,
    normaliser: float | int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float | None,
    chunk_rows: int | None,
    accumulate: str,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise SkimpError("reduction 'mean', 'sum' or 'none'", repr(reduction))
    if accumulate not in ("float32", "weight"):
        raise SkimpError("accumulate 'float32' or 'weight'", repr(accumulate))
    if normaliser is not None and reduction != "mean":
        raise SkimpError(
            "a normaliser",
            f"together with reduction='{reduction}'",
            "only the mean is divided",
            "use reduction='mean', or divide the result yourself",
        )
    if normaliser is not None and not (math.isfinite(normaliser) and normaliser > 0):
        raise SkimpError(
            "a positive normaliser",
            f"{normaliser}",
            "the optimizer step has no trained token",
            "leave out examples whose labels are all ignored when the data is prepared",
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise SkimpError("label_smoothing within 0 .. 1", f"{label_smoothing}")
    if z_loss < 0.0:
        raise SkimpError("z_loss of 0 or more", f"{z_loss}")
    if softcap is not None and not softcap > 0.0:
        raise SkimpError("a positive softcap, or None for no cap", f"{softcap}")
    if logit_scale is not None and (logit_scale == 0.0 or not math.isfinite(logit_scale)):
        raise SkimpError("a finite logit_scale other than 0, or None", f"{logit_scale}")
    if chunk_rows is not None and chunk_rows < 1:
        raise SkimpError("chunk_rows of 1 or more, or None for the rule", f"{chunk_rows}")


def _check_sink(weight: Tensor, into: Tensor) -> None:
    allowed = {weight.dtype, torch.float64 if weight.dtype == torch.float64 else torch.float32}
    if into.shape != weight.shape or into.dtype not in allowed or into.device != weight.device:
        raise SkimpError(
            f"weight_grad_into like the weight: {tuple(weight.shape)}, {' or '.join(map(str, allowed))}",
            f"{tuple(into.shape)}, {into.dtype}, on {into.device}",
            instead="torch.zeros_like(weight, dtype=torch.float32)",
        )
    if not weight.requires_grad:
        raise SkimpError(
            "weight_grad_into",
            "a frozen weight",
            "a frozen weight has no gradient to add",
            "leave weight_grad_into out",
        )
    if into.requires_grad:
        raise SkimpError("weight_grad_into without gradient", "it requires one", instead="use a plain buffer")


def refuse_double() -> None:
    """Called in backward, where grad mode is on only under create_graph: these gradients have no graph."""
    if torch.is_grad_enabled():
        raise SkimpError(
            "create_graph=True through a chunked head",
            "a gradient of its gradient was asked for",
            "its gradients are written by hand and carry no graph",
            "use skimp.losses.reference_cross_entropy where second derivatives are needed",
        )


def choose_compute(asked: torch.dtype | None, hidden: Tensor, exact: torch.dtype) -> torch.dtype:
    """The dtype of the operands of the matrix products; see `linear_cross_entropy`."""
    if asked is not None:
        if asked not in (exact, torch.bfloat16, torch.float16):
            raise SkimpError(f"compute_dtype {exact}, torch.bfloat16 or torch.float16", f"{asked}")
        return asked
    if exact == torch.float64 or hidden.device.type == "cpu":
        return exact
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype
