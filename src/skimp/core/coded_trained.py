"""Weights that train while they are kept in a codec: no float copy of them but one layer's, while it moves.

An update rule is given a *stand-in* for each coded weight: a parameter of its shape, dtype and device that holds a
single number, NaN, so that a rule which reads or writes it in place of the codes is found out at once. Its gradient is
that of the weight the codes stand for, whole, or as its two factors where `Trained.receive` takes them. A rule that
trains codes decodes one matrix (`decoded`), moves it and rounds it back at random (`put`).

    names = train_codes(model)                      # its coded linear layers
    rule = QGaLore([*model.named_parameters(), *stand_ins(model)], lr=1e-2)

Paper: Zhang et al., "Q-GaLore", 2024, arXiv 2407.08296, section 3.4.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skimp.core.codecs.integers import Integers
from skimp.core.codecs.integers_rounding import PIECE, round_into
from skimp.core.coded import product, product_back
from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.errors import SkimpError
from skimp.core.remake import how_made
from skimp.core.repeat import rounds

_MODULE = "_skimp_coded"


@dataclass
class Trained:
    """What a layer has whose codes train. A copy of the model is frozen until it is given its own.

    Attributes:
        stand_in: the weight as an update rule sees it. No parameter of the module, as it holds no weight.
        receive: takes (stand-in, dY, X) in place of the gradient dYᵀ·X; None where that is wanted whole.
    """

    stand_in: nn.Parameter
    receive: Callable[[Tensor, Tensor, Tensor], Any] | None = None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def forward(self, module: CodedLinear, x: Tensor) -> Tensor:
        """x W' + b; x and b get their gradients as always, the stand-in or `receive` that of W.

        An input that a fused layer can make again is not kept (`core.remake`).
        """
        cast = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type)) if cast else x
        made = None if cast or not torch.is_grad_enabled() else how_made(x)
        if made is not None:
            made.again.readers += 1
        kept = (x,) if made is None else made.inputs
        again = None if made is None else made.again
        y: Tensor = _Linear.apply(x, self.stand_in, module.bias, module, again, *kept)
        return y


def train_codes(model: nn.Module) -> list[str]:
    """Every coded linear layer of `model` gets a stand-in, and its bias trains; returns the layers' names.

    Call it when the codes are where they will stay: a stand-in is on their device. A second call changes nothing.

    Raises:
        SkimpError: a layer in a codec whose codes cannot move.
    """
    names = []
    for name, module in coded_layers(model):
        if not isinstance(module.codec, Integers):
            raise SkimpError(
                f"{name}.weight trained in codec '{module.codec.name}'",
                "no rounding at random into it",
                "rounded to the nearest level every move below half a step would be lost",
                "codec int8",
            )
        if module.trained is None:
            weight = module.weight
            number = torch.full((), float("nan"), dtype=weight.dtype, device=weight.device)
            module.trained = Trained(nn.Parameter(number.expand(weight.shape)))
            setattr(module.trained.stand_in, _MODULE, weakref.ref(module))
        if module.bias is not None:
            module.bias.requires_grad_(True)
        names.append(name)
    return names


def stand_ins(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(full name of the weight, its stand-in) of every layer whose codes train."""
    for name, module in coded_layers(model):
        if module.trained is not None:
            yield f"{name}.weight", module.trained.stand_in


def codes_of(parameter: Tensor) -> CodedLinear | None:
    """The layer a stand-in is for; None for every other parameter."""
    found = getattr(parameter, _MODULE, None)
    module: CodedLinear | None = None if found is None else found()
    if found is not None and module is None:
        raise SkimpError("the layer of a weight that trains in codes", "it is gone", "", "keep the model")
    return module


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything a file of the model must hold, by name: parameters, and the parts of coded layers."""
    yield from model.named_parameters(remove_duplicate=False)
    for name, module in coded_layers(model):
        yield from ((f"{name}.{key}", part) for key, part in module.named_parts())


@torch.no_grad()
def decoded(module: CodedLinear) -> Tensor:
    """(outputs, inputs) in float32 at least: what the codes stand for, decoded a few rows at a time."""
    weight = module.weight
    made = torch.empty(weight.shape, dtype=torch.promote_types(module.dtype, torch.float32), device=weight.device)
    step = max(1, PIECE // max(1, weight.shape[1]))
    for start in rounds(range(0, weight.shape[0], step)):
        stop = min(start + step, weight.shape[0])
        made[start:stop].copy_(weight.rows(start, stop, made.dtype))
    return made


def put(module: CodedLinear, weight: Tensor, seed: int, name: str, stream: int) -> None:
    """The codes now stand for `weight` (outputs, inputs), rounded at random with the noise of (seed, name, stream)."""
    round_into(module.codec, module.parts(), weight, seed, f"{name}.codes", stream=stream)


class _Linear(torch.autograd.Function):
    """Nothing of the codes is kept: a step in backward moves them once the gradient of x is made from the old ones."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stand_in: Tensor, bias: Tensor | None, module: CodedLinear, again: Any, *kept: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.module, ctx.again, ctx.shape = module, again, x.shape
        with torch.autocast(x.device.type, enabled=False):
            y = product(module.weight, x.reshape(-1, x.shape[-1]), bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        module: CodedLinear = ctx.module
        kept = ctx.saved_tensors
        g = upstream.reshape(-1, upstream.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = product_back(module.weight, g).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            db = g.sum(0)
        if ctx.needs_input_grad[1]:
            x = kept[0] if ctx.again is None else ctx.again(*kept)
            x = x.reshape(-1, x.shape[-1])
            if module.trained.receive is None:
                dw = torch.mm(g.t(), x)
            else:  # last: it may move the codes
                module.trained.receive(module.trained.stand_in, g, x)
        return (dx, dw, db, None, None, *(None for _ in kept))
