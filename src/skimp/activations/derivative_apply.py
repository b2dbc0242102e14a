"""Coded derivatives in a model, put where they pay by what a module is; reversible.

Activations and gated products are coded wherever they are found. A norm is coded where its gain is frozen and nothing
that reads it keeps it: a linear layer that trains (or carries an addition) keeps its input whole, and codes beside it
would only add to that. A frozen layer keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skimp.activations.derivative import Coding, gated, pointwise
from skimp.activations.derivative_norm import norm
from skimp.core.errors import ConflictError, EffectError
from skimp.core.structure import Structure
from skimp.kernels.apply import PLAIN_NORMS, Fused
from skimp.kernels.fused import fits_native, swiglu

#: Classes of activation modules and the function each computes, whatever its spelling.
KINDS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}
#: RMSNorms that store their gain less 1.
SHIFTED_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")


def kind_of(module: Any) -> str | None:
    """The activation a module computes; None for what has no table, or writes over its input."""
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return None if getattr(module, "inplace", False) else KINDS.get(type(module).__name__)


class Derivatives:
    """Activations, gated products and norms of `model` that keep codes for backward.

    Args:
        model: with what trains and what is frozen settled, adapters and fused layers in place.
        structure: its roles. coding: bits, grid and rounding. fused: the fused layers whose forwards are kept.

    Attributes:
        points, products, norms: how many modules of each were changed.
        runs: coded forwards of each, by name.

    Raises:
        ConflictError: nothing in the model can be coded.
    """

    def __init__(self, model: nn.Module, structure: Structure, coding: Coding, fused: Fused | None = None) -> None:
        self.coding, self._fused = coding, fused
        self.points = self.products = self.norms = 0
        self.runs: dict[str, int] = {}
        self._changed: list[tuple[nn.Module, Any]] = []
        taken: set[int] = set()
        for name, module in model.named_modules():
            if _is_gated(module):
                taken.add(id(module.act_fn))
                self._put(name, module, self._product(name, module))
                self.products += 1
            elif _is_norm(module) and not _kept_anyway(model, structure, name, module):
                self._put(name, module, self._norm(name, module))
                self.norms += 1
            elif kind_of(module) is not None and id(module) not in taken:
                self._put(name, module, self._point(name, module))
                self.points += 1
        if not self.runs:
            known = ", ".join(sorted(KINDS))
            raise ConflictError(
                "activations.derivative",
                f"no activation and no frozen norm with a table in a model of type '{structure.family}'",
                f"known are {known}",
                "activations.derivative=null",
            )

    def _put(self, name: str, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        self._changed.append((module, vars(module).get("forward")))
        self.runs[name] = 0
        module.forward = forward

    def remove(self) -> None:
        """Every module gets the forward back that it had, newest first."""
        for module, before in reversed(self._changed):
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._changed.clear()

    def assert_effect(self) -> None:
        """Something was coded.

        Raises:
            EffectError: no changed module ran coded.
        """
        if not any(self.runs.values()):
            raise EffectError(
                f"coded derivatives in {len(self.runs)} modules",
                "no forward was coded",
                "no gradient passes through them, or their forwards were replaced",
            )

    def describe(self) -> str:
        """'coded for backward: 3 gated products, 6 norms' for a person."""
        counts = ((self.points, "activations"), (self.products, "gated products"), (self.norms, "norms"))
        return "coded for backward: " + ", ".join(f"{n} {what}" for n, what in counts if n)

    def _coding(self, name: str) -> Coding:
        return replace(self.coding, name=name)

    def _took(self, name: str, *inputs: Tensor) -> bool:
        due = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        self.runs[name] += due
        return due

    def _point(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        plain, kind, coding = module.forward, str(kind_of(module)), self._coding(name)

        def forward(x: Tensor) -> Tensor:
            y: Tensor = pointwise(x, kind, coding, plain) if self._took(name, x) else plain(x)
            return y

        return forward

    def _product(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        kind, coding = str(kind_of(module.act_fn)), self._coding(name)

        def plain(gate: Tensor, up: Tensor) -> Tensor:
            if kind == "silu" and self._fused is not None and fits_native(gate, up, halves=self._fused.halves):
                return swiglu(gate, up)
            y: Tensor = module.act_fn(gate) * up
            return y

        def forward(x: Tensor) -> Tensor:
            gate, up = module.gate_proj(x), module.up_proj(x)
            hidden = gated(gate, up, kind, coding, plain) if self._took(name, gate, up) else plain(gate, up)
            y: Tensor = module.down_proj(hidden)
            return y

        return forward

    def _norm(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        plain, coding = module.forward, self._coding(name)
        centred, bias = isinstance(module, nn.LayerNorm), getattr(module, "bias", None)
        eps = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
        offset = 1.0 if type(module).__name__ in SHIFTED_NORMS else 0.0
        coded = partial(norm, eps=eps, centred=centred, offset=offset, coding=coding, plain=plain)

        def forward(x: Tensor) -> Tensor:
            y: Tensor = coded(x, module.weight, bias) if self._took(name, x) else plain(x)
            return y

        return forward


def _is_gated(module: Any) -> bool:
    parts = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    kind = kind_of(getattr(module, "act_fn", None))
    return all(isinstance(part, nn.Module) for part in parts) and kind is not None and kind != "relu"


def _is_norm(module: Any) -> bool:
    kind = type(module).__name__
    known = kind in PLAIN_NORMS or kind in SHIFTED_NORMS or isinstance(module, nn.LayerNorm)
    weight = getattr(module, "weight", None)
    return known and weight is not None and weight.dim() == 1


def _kept_anyway(model: nn.Module, structure: Structure, name: str, module: nn.Module) -> bool:
    """Whether the gain trains, or a layer beside the norm trains a matrix and so keeps what the norm made."""
    index = structure.block_of(name)
    readers = model.get_submodule(structure.head if index is None else structure.blocks[index])
    layers = (m for m in readers.modules() if hasattr(m, "weight"))
    matrices = (p for layer in layers for p in layer._parameters.values() if p is not None and p.dim() > 1)
    return bool(getattr(module, "weight").requires_grad) or any(p.requires_grad for p in matrices)  # noqa: B009
