"""Compact gradients: a linear layer whose backward gives the rule Pᵀ·G, and never forms G.

The weight's gradient is G = dYᵀ·X. Projected from the left it is (dY·P)ᵀ·X, of rows dY[:, I]ᵀ·X, so between changes of
basis neither the m × n matrix nor its product exists: 2·t·r·(m + n) operations for t tokens instead of 2·t·m·n (rows:
2·t·r·n, as in Grass, Muhamed et al., 2024, arXiv 2406.17660, section 3.3), and r·b numbers of gradient instead of a·b.
A step that is due a new basis forms the gradient of its first micro-batch, one matrix at a time.

    optimizer = Grass(groups, rank=256)
    with project_backward(model, optimizer) as layers:
        loss.backward()   # no weight.grad for the layers in `layers`
        optimizer.step()

`weight.grad` stays None, so what reads gradients between backward and step does not see them: clipping by the global
norm would see the others alone. Layers of which a fused form runs are not called, and are not projected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from skimp.core.errors import SkimpError
from skimp.optim.projected import Projected


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b with the usual gradients of x and b; that of W goes to the rule as the factors of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Linear, rule: Projected) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module, ctx.rule = module, rule
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[1]:
            ctx.rule.add_factors(ctx.module.weight, dy.flatten(0, -2), x.flatten(0, -2))
        return dx, None, db, None, None


@contextmanager
def project_backward(model: nn.Module, rule: Projected) -> Iterator[list[str]]:
    """Inside, every `nn.Linear` whose weight `rule` projects gives it projected gradients; yields their names.

    Raises:
        SkimpError: the rule needs whole gradients, or projects no linear layer of the model.
    """
    if not getattr(rule, "adds_up", False):
        raise SkimpError(
            f"compact gradients for {rule.rule}",
            "it uses the whole gradient beside its projection",
            "what is never formed cannot be added, scaled or fed back",
            "galore, galore2, q-galore, natural-galore or grass",
        )
    known = {id(p): p for p in rule.parameters()}
    chosen = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module.weight) in known and rule.rank_of(module.weight) is not None
    }
    if not chosen:
        raise SkimpError(f"compact gradients for {rule.rule}", "no nn.Linear whose weight it projects")

    def patched(module: nn.Linear) -> Any:
        apply: Any = _Linear.apply
        return lambda x: apply(x, module.weight, module.bias, module, rule)

    for module in chosen.values():
        module.forward = patched(module)  # type: ignore[method-assign]
    try:
        yield list(chosen)
    finally:
        for module in chosen.values():
            del module.forward
