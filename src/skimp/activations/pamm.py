"""PAMM in a model: queries, keys and values keep a few rows of their input, and an index and a factor a token.

Outputs and the gradients of inputs and biases are the layers' own; the three weights' gradients are those of the
approximated input (`activations.points`). The three read one tensor and keep one approximation of it between them.
Which rows are generators is drawn anew for every micro-batch, from the optimizer step and the rows before it, so that a
block that is run again in backward and a run that goes on draw the same.

Kept of t tokens of n numbers of s bytes, k = t / one_of of them generators: k·n·s + t·(s + 2) bytes instead of t·n·s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skimp.activations.points import Points, compress, count_of, draw_rows, weight_gradient
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.position import Position, position
from skimp.core.remake import how_made, once_for
from skimp.core.structure import Structure, input_name

ROLES = ("q", "k", "v", "qkv")


class PAMM:
    """The layers of `model` that make queries, keys and values keep points of their input; `remove` restores them.

    Args:
        model: with what trains and what is frozen settled, fused layers in place.
        structure: its roles.
        one_of: a generator for so many tokens of a micro-batch. eps: as in `points.compress`. seed: of the draws.

    Attributes:
        layers: names of those layers.
        input_bytes, kept_bytes: by layer, of the inputs of training forwards and of what is kept of them, once for
            layers that share it.

    Raises:
        ConflictError: no such layer is a plain linear layer.
    """

    def __init__(
        self, model: nn.Module, structure: Structure, one_of: int, eps: float | None = None, seed: int = 0
    ) -> None:
        self.one_of, self.eps, self.seed = one_of, eps, seed
        inside = [name for role in ROLES for name in structure.roles.get(role, ())]
        named = {f"{block}.{name}" for block in structure.blocks for name in inside}
        self._modules = {n: m for n, m in model.named_modules() if n in named and _is_linear(m)}
        if not self._modules:
            raise ConflictError(
                "activations.pamm",
                f"no linear layer for queries, keys and values in a model of type '{structure.family}'",
                f"such layers have the roles {', '.join(ROLES)}",
                "activations.pamm=null",
            )
        self.layers = list(self._modules)
        self.input_bytes, self.kept_bytes = dict.fromkeys(self.layers, 0), dict.fromkeys(self.layers, 0)
        self._ran: set[str] = set()
        self._made_again: set[str] = set()
        self._under = {name: vars(module).get("forward") for name, module in self._modules.items()}
        for name, module in self._modules.items():
            module.forward = self._forward(name, module, module.forward)
            module.keeps_input_itself = True

    def _forward(self, name: str, module: Any, plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if not torch.is_grad_enabled() or not module.weight.requires_grad:
                return plain(x)
            given = x
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            elif how_made(x) is not None:
                self._made_again.add(name)
            self._ran.add(name)
            here = self._here(name)
            key = (input_name(name), here.step, here.row, x.dtype)
            points = once_for(given, key, lambda: self._points(name, x, here))
            y: Tensor = _Linear.apply(x, module.weight, module.bias, type(module) is not nn.Linear, *points.tensors())  # type: ignore[no-untyped-call]
            return y

        return forward

    def _here(self, name: str) -> Position:
        here = position()
        if here is None:
            raise SkimpError(
                f"points of the input of {name}",
                "a training forward whose place in the run was not declared",
                "generators are drawn by step and row; without them every step would draw the same",
                "with skimp.core.position.declared_position(step, first_row): loss = model(...)",
            )
        return here

    def _points(self, name: str, x: Tensor, here: Position) -> Points:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        first = here.row * (rows // max(1, x.shape[0]))
        where = (self.seed, f"{input_name(name)}.points", first, here.step)
        with torch.autocast(x.device.type, enabled=False):  # cosines in bfloat16 would tell few rows apart
            points = compress(flat, draw_rows(rows, count_of(rows, self.one_of), *where, like=flat), self.eps)
        self.input_bytes[name] += flat.numel() * flat.itemsize
        self.kept_bytes[name] += sum(t.numel() * t.itemsize for t in points.tensors())
        return points

    def remove(self) -> None:
        """Every layer gets the forward it had."""
        for name, module in self._modules.items():
            del module.keeps_input_itself
            held = self._under[name]
            if held is None:
                vars(module).pop("forward", None)
            else:
                module.forward = held
        self._modules = {}

    def assert_effect(self) -> None:
        """Every layer that trains ran so, and kept fewer bytes than its input's.

        Raises:
            EffectError: names one that did not, or whose input costs nothing as it is.
        """
        trained = {name for name, module in self._modules.items() if module.weight.requires_grad}
        idle = sorted(trained - self._ran)
        if idle or not self._ran or not self._modules:
            found = f"{idle[0]} ran as it is" if idle else "none of them trains, or they are not wrapped"
            raise EffectError(f"points of the inputs of {len(self.layers)} layers", found, "its input was kept whole")
        if self._made_again:
            raise EffectError(
                f"points of the inputs of {len(self.layers)} layers",
                f"the input of {min(self._made_again)} is made again from what a fused norm keeps anyway",
                "whole it costs nothing, and points of it cost more",
                ["exact.kernels=plain", "activations.pamm=null"],
            )
        if sum(self.kept_bytes.values()) >= sum(self.input_bytes.values()):
            raise EffectError(
                f"one of {self.one_of} tokens kept",
                f"{sum(self.kept_bytes.values()):,} bytes for inputs of {sum(self.input_bytes.values()):,}",
                "nothing was saved",
                "a larger activations.pamm",
            )


class _Linear(torch.autograd.Function):
    """y = x·Wᵀ + b; exact but for W's gradient, which is that of the points."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, columns: bool, *points: Tensor
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(weight, *points)
        ctx.columns = columns
        return nn.functional.linear(x, weight.t() if columns else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        points = Points(*kept)
        dy = upstream.reshape(-1, upstream.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            w = weight.to(dy.dtype)
            dx = dy @ (w.t() if ctx.columns else w)
            dx = dx.view(*upstream.shape[:-1], dx.shape[1])
            del w
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(points, dy, ctx.columns).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0)
        return (dx, dw, db, None, *(None for _ in kept))


def _is_linear(module: Any) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"
