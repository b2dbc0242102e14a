"""A checkpoint whose linear layers trained in a codec, read as the weights that training saw: decoded one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.coded_linear import PREFIX
from skimp.core.coded_model import is_transposed, linear_layers
from skimp.core.structure import read_structure
from skimp.run.checkpoint_read import Checkpoint
from skimp.run.stored import CheckpointTensors
from skimp.run.tensor_bytes import Spec


class CodedTensors(CheckpointTensors):
    """Tensors by their names and shapes in the plain model.

    Args:
        saved: holds "….weight_codes" and the other parts in the place of "….weight".
        model: the plain model without storage: shapes, and which layers store their weight transposed.
        codec: that the parts are of. dtype: what training computed in.
    """

    def __init__(self, saved: Checkpoint, model: nn.Module, codec: Any, dtype: torch.dtype) -> None:
        super().__init__(saved)
        self._codec, self._dtype = codec, dtype
        layers = linear_layers(model, read_structure(model))
        self._layers: dict[str, Any] = {f"{name}.weight": module for name, module in layers.items()}
        dense = {name: Spec(dtype, tuple(module.weight.shape)) for name, module in self._layers.items()}
        parts = {self._part(name, key) for name in dense for key in codec.spec(())}
        self._specs = {n: spec for n, spec in self._specs.items() if n not in parts} | dense

    @staticmethod
    def _part(name: str, key: str) -> str:
        return f"{name.removesuffix('weight')}{PREFIX}{key}"

    def read(self, name: str) -> Tensor:
        module = self._layers.get(name)
        if module is None:
            return super().read(name)
        turned = is_transposed(module)
        rows, columns = module.weight.shape[::-1] if turned else module.weight.shape
        keys = self._codec.spec((rows, columns))
        parts: Mapping[str, Tensor] = {key: super(CodedTensors, self).read(self._part(name, key)) for key in keys}
        weight: Tensor = self._codec.decode(parts, (rows, columns), self._dtype)
        return weight.t().contiguous() if turned else weight

    def read_into(self, name: str, target: Tensor) -> None:
        if name in self._layers:
            target.copy_(self.read(name))
        else:
            super().read_into(name, target)
