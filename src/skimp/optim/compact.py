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
norm would see the others alone. A recipe says `compact: true` under `optimizer`, and is held to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import SkimpError
from skimp.core.remake import how_made, once_for
from skimp.core.sharded import is_sharded
from skimp.optim.adding import check_adds_up
from skimp.optim.projected import Projected

#: (weight, left, right): G = leftᵀ·right in the weight's own layout, never formed.
Receive = Callable[[Tensor, Tensor, Tensor], Any]


class Compact:
    """Every linear layer of `model` whose weight `rule` projects hands over the factors of its gradient; reversible.

    Layers that keep their input in a form of their own give whole gradients, which the rule projects. An input that a
    fused layer can make again is not kept (`core.remake`), as other linear layers do it. Of a rule with
    `small_input` (CompAct) a layer keeps that of its input and hands it over as the factor; layers that read the same
    tensor and share a projection keep it once.

    Attributes:
        layers: names of those layers.
        receive: takes the factors; the rule's own `add_factors` unless a delivery of gradients is put between.

    Raises:
        SkimpError: the rule needs whole gradients, or projects no linear layer of the model; a sharded weight.
    """

    def __init__(self, model: nn.Module, rule: Projected, receive: Receive | None = None) -> None:
        check_adds_up(rule)
        self.receive: Receive = receive or rule.add_factors
        known = {id(p) for p in rule.parameters()}
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if (weight := _weight(module)) is not None
            and id(weight) in known
            and rule.rank_of(weight) is not None
            and not getattr(module, "keeps_input_itself", False)
        }
        if not self._modules:
            raise SkimpError(f"compact gradients for {rule.rule}", "no nn.Linear whose weight it projects")
        weights = {name: _weight(module) for name, module in self._modules.items()}
        sharded = next((name for name, weight in weights.items() if is_sharded(weight)), None)
        if sharded is not None:
            raise SkimpError(
                f"compact gradients for {rule.rule}",
                f"{sharded} is sharded over processes",
                "its projection is a function of the whole gradient, of which each process has its own tokens' part",
                "leave the layers between hidden states whole on every process",
            )
        #: of a rule that takes projected inputs: itself.
        self.inputs: Any = rule if hasattr(rule, "small_input") else None
        if self.inputs is not None:
            self._check_sides(self.inputs)
        self.layers = list(self._modules)
        rule.compact = frozenset(rule.name_of(weight) for weight in weights.values())
        self._before = {name: vars(module).get("forward") for name, module in self._modules.items()}
        for module in self._modules.values():
            if isinstance(module, CodedLinear):  # its own backward knows factors
                module.trained.receive = lambda *factors: self.receive(*factors)
            else:
                module.forward = self._forward(module)

    def _check_sides(self, rule: Any) -> None:
        for name, module in self._modules.items():
            if rule.turned(module.weight) != (type(module) is nn.Linear):
                raise SkimpError(
                    f"compact inputs for {rule.rule}",
                    f"{name} stores its outputs as columns, and its group does not say so",
                    "the projection would be of the outputs",
                    "groups of skimp.optim.role_groups(…, roles(model))",
                )

    def _forward(self, module: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            given, cast = x, torch.is_autocast_enabled(x.device.type)
            if cast:
                x = x.to(torch.get_autocast_dtype(x.device.type))
            trains = torch.is_grad_enabled() and module.weight.requires_grad
            made = None if cast or not trains else how_made(x)
            if made is not None:
                made.again.readers += 1
            kept: tuple[Tensor, ...] = () if made is None else made.inputs
            if trains and made is None:
                kept = (self._kept(module.weight, x, given),)
            again = None if made is None else made.again
            y: Tensor = _Linear.apply(x, module.weight, module.bias, self, module, again, *kept)  # type: ignore[no-untyped-call]
            return y

        return forward

    def _kept(self, weight: Tensor, x: Tensor, given: Tensor) -> Tensor:
        """What a layer keeps of its input: x itself, or its projection, once for all layers that read `given` and share
        one."""
        if self.inputs is None:
            return x
        key = (self.inputs.projection_of(weight), x.dtype)
        found: Tensor = once_for(given, key, lambda: self.inputs.small_input(weight, x))
        return found

    def remove(self) -> None:
        """Every layer gets the forward it had."""
        for name, module in self._modules.items():
            held = self._before[name]
            if isinstance(module, CodedLinear):
                module.trained.receive = None
            elif held is None:
                vars(module).pop("forward", None)
            else:
                module.forward = held
        self._modules = {}


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b with the usual gradients of x and b; that of W goes on as the factors of it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, compact: Compact, module: Any, again: Any,
        *kept: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(weight, *kept)
        ctx.compact, ctx.module, ctx.again = compact, module, again
        ctx.columns = type(module) is not nn.Linear
        return nn.functional.linear(x, weight.t() if ctx.columns else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dy = upstream.reshape(-1, upstream.shape[-1])
        dx = db = None
        if ctx.needs_input_grad[0]:
            w = weight.to(dy.dtype)
            dx = dy @ (w.t() if ctx.columns else w)
            dx = dx.view(*upstream.shape[:-1], dx.shape[1])
            del w
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)
        if ctx.needs_input_grad[1]:
            x = kept[0] if ctx.again is None else ctx.again(*kept)
            x = x.reshape(-1, x.shape[-1])
            inputs, weight = ctx.compact.inputs, ctx.module.weight  # a recomputed block gave a view of it
            if inputs is not None and ctx.again is not None:
                x = inputs.small_input(weight, x)
            # Last: a step in backward moves the weight here.
            ctx.compact.receive(weight, *((x, dy) if ctx.columns and inputs is None else (dy, x)))
        return (dx, None, db, None, None, None, *(None for _ in kept))


def _weight(module: Any) -> Any:
    """The weight, as a rule knows it, of `nn.Linear`, of GPT-2's layers, which store outputs as columns, and of a coded
    layer that trains; None for any other module."""
    if isinstance(module, CodedLinear):
        return None if module.trained is None else module.trained.stand_in
    return module.weight if type(module) is nn.Linear or type(module).__name__ == "Conv1D" else None


@contextmanager
def project_backward(model: nn.Module, rule: Projected) -> Iterator[list[str]]:
    """Inside, every linear layer whose weight `rule` projects gives it projected gradients; yields their names.

    Raises:
        SkimpError: the rule needs whole gradients, or projects no linear layer of the model.
    """
    compact = Compact(model, rule)
    try:
        yield compact.layers
    finally:
        compact.remove()
