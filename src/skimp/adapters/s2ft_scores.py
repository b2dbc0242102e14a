"""Scores of heads and channels from a few batches: how strong they are, or how much the loss asks of them.

activation: the norm, over all tokens, of what a unit carries: inputs of o and down, outputs of v and up.
product: that times the norm of its weights. gradient: the norm of the mean loss's gradient with respect to its weights.

A gradient of a whole matrix exists for one layer at a time and is freed once its norms are taken.

Paper: "S2FT", Yang et al., 2024, arXiv 2412.06289, section 3.2 (selection strategies W, A, S and G).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.s2ft_select import KINDS, S2FTSpec, Units, units_of, weight_norms
from skimp.adapters.targets import is_transposed, linear_layers
from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.structure import Structure, read_structure


def measured(
    model: nn.Module,
    spec: S2FTSpec,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    structure: Structure | None = None,
) -> dict[str, Tensor]:
    """Layer -> one score a unit, as `choose` takes them.

    Args:
        model: plain, no adapter attached; its weights and what they train stay as they are.
        spec: `select` and the shares that are not 0.
        batches: the text. loss: runs the model on one of them.

    Raises:
        SkimpError: nothing is measured for `random` and `weight`, or there was no batch.
    """
    if spec.select in ("random", "weight"):
        raise SkimpError(f"scores for select={spec.select}", "it needs none", instead="activation, product or gradient")
    structure = structure or read_structure(model)
    kinds = [k for k in KINDS if getattr(spec, k) > 0.0]
    coded = [n for n in linear_layers(model, structure) if isinstance(model.get_submodule(n), CodedLinear)]
    if coded and spec.select == "gradient":
        raise ConflictError(
            "adapter.select=gradient",
            f"{coded[0]} has codes and no numbers",
            "codes have no gradient to take a norm of",
            ["select=activation or select=product: both need the model's forward alone", "model.weights=null"],
        )
    layers = [u for blocks in units_of(model, structure, kinds).values() for block in blocks for u in block]
    by_gradient = spec.select == "gradient"
    squares = (_by_gradient if by_gradient else _by_activation)(model, layers, batches, loss)
    if len(squares) < len(layers):
        raise SkimpError("scores of heads and channels", "no batch", "a score is measured on text", "a few batches")
    found = {name: square.sqrt() for name, square in squares.items()}
    if spec.select == "product":
        return {u.member.module: found[u.member.module] * weight_norms(model, u) for u in layers}
    return found


def _unit_sums(units: Units, numbers: Tensor) -> Tensor:
    """(count,) sums over the rows or columns of each unit."""
    first = units.member.offset
    return numbers[first : first + units.count * units.size].view(units.count, units.size).sum(1)


def _add(found: dict[str, Tensor], units: Units, squares: Tensor) -> None:
    here = _unit_sums(units, squares)
    name = units.member.module
    found[name] = found[name] + here if name in found else here


def _by_activation(
    model: nn.Module, layers: list[Units], batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def hook(units: Units) -> Callable[[Any, Any, Any], None]:
        def seen(module: Any, given: Any, y: Any) -> None:
            carried = given[0] if units.member.side == "columns" else y
            _add(found, units, carried.detach().float().flatten(0, -2).square().sum(0))

        return seen

    hooks = [model.get_submodule(u.member.module).register_forward_hook(hook(u)) for u in layers]
    try:
        with torch.no_grad():
            for batch in batches:
                loss(batch)
    finally:
        for handle in hooks:
            handle.remove()
    return found


def _by_gradient(
    model: nn.Module, layers: list[Units], batches: Iterable[Any], loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Norms of gradients add up as squares over batches."""
    found: dict[str, Tensor] = {}
    asked = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in asked:
        p.requires_grad_(False)

    def hook(units: Units, transposed: bool) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            assert p.grad is not None
            whole = p.grad.t() if transposed else p.grad
            _add(found, units, whole.float().square().sum(0 if units.member.side == "columns" else 1))
            p.grad = None

        return arrived

    hooks = []
    for units in layers:
        module: Any = model.get_submodule(units.member.module)
        module.weight.requires_grad_(True)
        hooks.append(module.weight.register_post_accumulate_grad_hook(hook(units, is_transposed(module))))
    try:
        for batch in batches:
            loss(batch).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in hooks:
            handle.remove()
        for p, wanted in asked:
            p.requires_grad_(wanted)
    return found
