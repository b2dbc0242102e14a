"""A model's linear layers put into a codec, one at a time: with weights in place or, on the meta device, before.

Only linear layers are: embeddings, the output head (often the embedding itself), norms and biases keep their precision,
as the QLoRA paper has it (arXiv 2305.14314, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.errors import ConflictError, EffectError, SkimpError
from skimp.core.structure import Structure

#: Makes the parts of a dense (outputs, inputs) weight.
Coder: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]


def is_transposed(module: nn.Module) -> bool:
    """Whether the layer stores (inputs, outputs), as transformers' Conv1D of GPT-2 does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def stored_transposed(module: nn.Module) -> bool:
    """Whether files have the layer's weight as (inputs, outputs), however it is kept here."""
    return module.stored_transposed if isinstance(module, CodedLinear) else is_transposed(module)


def linear_layers(model: nn.Module, structure: Structure) -> dict[str, nn.Module]:
    """Every linear layer but the head, coded or not, by full name in the model's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, (nn.Linear, CodedLinear)) or is_transposed(module)) and name != structure.head
    }


@torch.no_grad()
def encode_model(
    model: nn.Module, structure: Structure, codec: Any, coders: Mapping[str, Coder] | None = None
) -> list[str]:
    """Put every linear layer but the head into `codec`, in place; returns their names.

    Layers whose weight is on the meta device become empty coded ones, to be filled by `CodedLinear.take`; others are
    encoded one by one, so that the peak is the model and one layer's parts.

    Args:
        coders: layer -> what makes its parts in the codec's place (`CodedLinear.coder`).

    Raises:
        SkimpError: there is none, or a weight that is not finite, by name.
    """
    names = [name for name, module in linear_layers(model, structure).items() if not isinstance(module, CodedLinear)]
    if not names:
        raise SkimpError(f"linear layers in codec '{codec.name}'", "none below the head", "", "leave the codec out")
    for name in names:
        parent, _, leaf = name.rpartition(".")
        coder = (coders or {}).get(name)
        setattr(model.get_submodule(parent), leaf, encoded(model.get_submodule(name), codec, name, coder))
    return names


def encoded(module: Any, codec: Any, name: str = "", coder: Coder | None = None) -> CodedLinear:
    """The coded form of one linear layer; its bias is the same parameter, frozen."""
    weight: Tensor = module.weight
    turned = is_transposed(module)
    inputs, outputs = weight.shape if turned else weight.shape[::-1]
    made = CodedLinear(inputs, outputs, codec, dtype=weight.dtype, device=weight.device, stored_transposed=turned)
    if module.bias is not None:
        made.bias = module.bias.requires_grad_(False)
    made.train(module.training)
    made.coder = coder
    if weight.device.type != "meta":
        take_named(made, weight, name)
    return made


def take_named(module: CodedLinear, weight: Tensor, name: str) -> None:
    """`module.take(weight)`, with the layer's name in what is refused."""
    try:
        module.take(weight)
    except SkimpError as error:
        asked = f"{name}.weight in codec '{module.codec.name}'"
        raise SkimpError(asked, error.found, error.why, error.instead) from error


def refuse_coded(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse to change weights that are kept in a codec.

    Raises:
        ConflictError: one of the modules `names` is coded; with the two ways to merge.
    """
    coded = [name for name in names if isinstance(model.get_submodule(name), CodedLinear)]
    if coded:
        codec = cast("CodedLinear", model.get_submodule(coded[0])).codec.name
        raise ConflictError(
            f"merging into {len(coded)} layers kept in codec '{codec}'",
            f"{coded[0]} has codes and no numbers to add to",
            "coded again, the sum would lose most of a small change: steps between levels are larger than it",
            [
                "skimp export RUN --to merged --onto dequantised: a plain model of the weights that training saw",
                "skimp export RUN --to merged --onto original: of those before they were coded",
            ],
        )


def parameter_count(model: nn.Module) -> int:
    """Numbers in the model, tied ones once; of a coded layer those that its parts stand for."""
    return sum(p.numel() for p in model.parameters()) + sum(m.weight.numel() for _, m in coded_layers(model))


def largest_coded(model: nn.Module) -> int:
    """Numbers in the largest coded weight; 0 without one."""
    return max((module.weight.numel() for _, module in coded_layers(model)), default=0)


def assert_coded(model: nn.Module, structure: Structure, codec: Any, beside: Iterable[Tensor] = ()) -> None:
    """Every linear layer but the head is in `codec` and no dense copy of it is in the model.

    Args:
        beside: tensors that an adapter put there; layers of its own are no part of the base.

    Raises:
        EffectError: names those that are not.
    """
    own = {id(tensor) for tensor in beside}
    base = {n: m for n, m in linear_layers(model, structure).items() if id(m._parameters.get("weight")) not in own}
    dense = [
        name
        for name, module in base.items()
        if not isinstance(module, CodedLinear) or module.codec != codec or "weight" in module._parameters
    ]
    if dense:
        raise EffectError(
            f"frozen weights in codec '{codec.name}'",
            f"{len(dense)} layers are dense, first {dense[0]}",
            "their memory was not saved",
        )
