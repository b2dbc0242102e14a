"""How the chunked head meets autograd: gradients made in forward (`Total`) or in backward (`PerToken`).

A scalar loss needs nothing from upstream but a factor, so its gradients are made while each chunk's softmax
is at hand, held as N x H and V x H, and scaled once in backward. Losses per token need each token's upstream
gradient before the sum over tokens, so their chunks are run a second time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.memory.tracker import scope
from skimp.losses.head_arguments import refuse_double
from skimp.losses.head_loop import HeadLoop
from skimp.losses.head_spec import HeadSpec


def gradients(
    spec: HeadSpec,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    safe: Tensor,
    scale: Tensor,
    into: Tensor | None,
    losses: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Run the loop; returns the gradients of hidden, weight (None when it went `into` a sink) and bias."""
    dh = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if spec.grad_hidden else None
    dw, db = into, None
    with scope("gradients"):
        if into is None and spec.weight_grad_dtype is not None:
            dw = torch.zeros(weight.shape, dtype=spec.weight_grad_dtype, device=weight.device)
        if spec.grad_bias:
            db = torch.zeros(spec.vocab, dtype=spec.exact, device=weight.device)
    for_logits = scale if spec.logit_scale is None else scale * spec.logit_scale
    loop = HeadLoop(spec, hidden, weight, widen(bias, spec), safe)
    loop.run(losses, for_logits, dh, dw, db)
    del loop  # the chunk buffers go before the casts below come
    with scope("gradients"):
        given_w = None if dw is None or into is not None else dw.to(weight.dtype)
        given_b = None if db is None or bias is None else db.to(bias.dtype)
    return dh, given_w, given_b


def widen(bias: Tensor | None, spec: HeadSpec) -> Tensor | None:
    """The bias in the dtype of the logits, to which it is added before they are scaled."""
    return None if bias is None else bias.detach().to(spec.exact)


class Total(torch.autograd.Function):
    """mean and sum: value and gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        safe: Tensor,
        scale: Tensor,
        spec: HeadSpec,
        into: Tensor | None,
    ) -> Tensor:
        losses = torch.empty_like(scale)
        with torch.autocast(hidden.device.type, enabled=False):
            if spec.grad:
                sink = into if spec.weight_grad_dtype is not None else None
                if sink is not None:
                    _refuse_in_recompute()
                ctx.grads = gradients(spec, hidden, weight, bias, safe, scale, sink, losses)
                ctx.one = None if sink is None else torch.ones((), dtype=spec.exact, device=hidden.device)
            else:
                HeadLoop(spec, hidden, weight, widen(bias, spec), safe).run(losses)
            return torch.dot(losses.view(-1), scale.view(-1))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double()
        if ctx.grads is None:
            raise SkimpError(
                "a second backward through linear_cross_entropy",
                "the gradients made in forward were handed out by the first backward",
                "they are scaled in place, so that no second copy of them exists",
                "call the forward again, or sum the losses of reduction='none': it recomputes in backward",
            )
        grads, ctx.grads = ctx.grads, None
        if ctx.one is not None:
            _assert_one(upstream, ctx.one)
        else:
            for grad in grads:
                if grad is not None:
                    grad.mul_(upstream)
        return (*grads, None, None, None, None)


class PerToken(torch.autograd.Function):
    """none: losses in forward; the chunks again in backward, each token's upstream gradient in its scale."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        safe: Tensor,
        scale: Tensor,
        spec: HeadSpec,
        into: Tensor | None,
    ) -> Tensor:
        losses = torch.empty_like(scale)
        value = replace(spec, weight_grad_dtype=None, grad_hidden=False, grad_bias=False)
        with torch.autocast(hidden.device.type, enabled=False):
            HeadLoop(value, hidden, weight, widen(bias, spec), safe).run(losses)
        ctx.save_for_backward(hidden, weight, bias, safe, scale)
        ctx.spec, ctx.into = spec, into
        return losses.mul_(scale).view(-1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double()
        hidden, weight, bias, safe, scale = ctx.saved_tensors
        sink = ctx.into if ctx.spec.weight_grad_dtype is not None else None
        with torch.autocast(hidden.device.type, enabled=False):
            grads = gradients(ctx.spec, hidden, weight, bias, safe, scale * upstream.view(-1, 1), sink, None)
        return (*grads, None, None, None, None)


def _refuse_in_recompute() -> None:
    """A scalar loss that runs inside a backward is being recomputed: its sink would be filled twice."""
    if torch._C._current_graph_task_id() != -1:
        raise SkimpError(
            "linear_cross_entropy with weight_grad_into inside a recomputed region",
            "its forward is running again, during backward",
            "the weight gradient was added to the sink by the first forward and would be added twice",
            "keep the head outside the checkpointed region (it holds no logits), or use reduction='none'",
        )


def _assert_one(upstream: Tensor, one: Tensor) -> None:
    """Raise, without reading a value to the host, when the loss was scaled after the sink was filled."""
    text = "upstream gradient other than 1"
    try:
        torch._assert_async(upstream.eq(one), text)
    except RuntimeError as error:
        if text not in str(error):
            raise
        raise SkimpError(
            "loss.backward() with weight_grad_into",
            "an upstream gradient other than 1: the loss was multiplied or divided after the head",
            "the weight gradient went into the sink during forward and cannot be scaled any more",
            "give the factor as grad_scale= or normaliser=, or use reduction='none'",
        ) from error
