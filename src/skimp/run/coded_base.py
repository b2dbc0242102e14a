"""From a recipe's `model.weights:` to linear layers in a codec, filled tensor by tensor: frozen, or trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.coded_model import take_named
from skimp.core.coded_trained import stand_ins, train_codes
from skimp.core.registry import load
from skimp.core.structure import trainable
from skimp.core.units import format_bytes
from skimp.kernels.native.nf4 import load as load_native
from skimp.run.base import checksum
from skimp.run.tensor_bytes import Staging


def weight_codec(recipe: Any) -> Any | None:
    """The codec of the linear layers below the head; None where it is kept in the precision."""
    load_native()
    asked = recipe.model.weights
    return None if asked is None else load(asked.name, "codec")(**asked.options())


def trained(model: nn.Module, recipe: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """What the run trains, by name: parameters, and without an adapter the stand-ins of weights in codes."""
    if recipe.model.weights is not None and recipe.adapter is None:
        train_codes(model)
    yield from trainable(model)
    yield from stand_ins(model)


def take(module: CodedLinear, weight: Tensor, name: str) -> None:
    """Encode a dense weight, as it came and in the run's dtype, and note its checksum for the base's fingerprint."""
    module.dense_crc = checksum(weight, Staging())
    take_named(module, weight, name)


def stored_shape(module: CodedLinear) -> tuple[int, int]:
    """The shape in which files have the layer's weight."""
    outputs, inputs = module.weight.shape
    return (inputs, outputs) if module.stored_transposed else (outputs, inputs)


def stand_in(module: CodedLinear) -> nn.Module:
    """A dense layer of the kind it stands for, zeroed, that shares its bias: what an initialiser may fill."""
    with torch.device("meta"):
        if module.stored_transposed:
            from transformers.pytorch_utils import Conv1D

            made: Any = cast("Any", Conv1D)(module.out_features, module.in_features)
        else:
            made = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
    made.weight = nn.Parameter(torch.zeros(stored_shape(module), dtype=module.dtype), requires_grad=False)
    if module.bias is not None:
        made.bias = module.bias
    stood: nn.Module = made
    return stood


def coded_words(model: nn.Module) -> list[str]:
    """What of the model is coded, for a person; nothing without."""
    layers = [module for _, module in coded_layers(model)]
    if not layers:
        return []
    numbers, size = sum(m.weight.numel() for m in layers), sum(m.weight.nbytes for m in layers)
    what = "base" if layers[0].trained is None else "trained in codes"
    return [
        f"{what}: {len(layers)} linear layers in {layers[0].codec.name}, {numbers:,} weights in {format_bytes(size)} "
        f"({8 * size / numbers:.3f} bits each)"
    ]
