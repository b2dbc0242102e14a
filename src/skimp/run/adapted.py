"""A base and the low-rank addition trained on it, read as one model: each weight is merged when its turn comes.

What an adapter's checkpoint holds is the addition alone; the base lies where it was loaded from. Read through here the
two are one set of tensors, so that scoring, generating and writing a merged model need neither of them whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.lora import A, B
from skimp.adapters.merge import add_product
from skimp.adapters.spec import Spec as Addition
from skimp.core.errors import CheckpointError
from skimp.run.base import checksum, line
from skimp.run.skeleton import skeleton
from skimp.run.stored import Stored, names_for
from skimp.run.tensor_bytes import Spec, Staging
from skimp.run.weights import owners


class AdaptedTensors:
    """The tensors of a base with an adapter merged in.

    Args:
        base: the base's own tensors.
        config: content of the model's HF config.json.
        dtype: what the base was held in while the adapter was trained; its tensors are rounded to it first.
        addition: rank and scale of every module.
        names: names of the adapter's tensors, as in the model: "….q_proj.lora_A", "….embed_tokens.weight".
        get: one of them by name.
        expected: fingerprint of the base the adapter was trained on; "" where it is not known.
        close: closes what `get` reads from.
    """

    def __init__(
        self,
        base: Stored,
        config: dict[str, Any],
        dtype: torch.dtype,
        addition: Addition,
        names: set[str],
        get: Callable[[str], Tensor],
        expected: str = "",
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.base, self.dtype, self.addition, self.expected = base, dtype, addition, expected
        self._names, self.get, self._close = names, get, close
        self._model = skeleton(config, dtype)
        targets: dict[str, Any] = dict(self._model.named_parameters(remove_duplicate=False))
        self._owner = owners(self._model)
        self._written: dict[str, str] = {}
        for known, written in names_for(base, targets).items():
            if known == self._owner[known] or self._owner[known] not in self._written:
                self._written[self._owner[known]] = written
        # A merged weight is float32 until it is written: its sum with the addition is rounded once.
        self._specs = {
            n: Spec(torch.float32 if self._is_merged(n) else dtype, tuple(targets[n].shape)) for n in self._written
        }
        self._sums: dict[str, int] = {}

    def specs(self) -> Mapping[str, Spec]:
        """By the name in the model, tied tensors once."""
        return self._specs

    def _is_merged(self, name: str) -> bool:
        return f"{name.removesuffix('.weight')}.{A}" in self._names

    def read(self, name: str) -> Tensor:
        """The base's tensor, with s B A added or replaced by what was trained in full."""
        value = self.base.read(self._written[name]).to(self.dtype)
        if self.expected and name not in self._sums:
            self._sums[name] = checksum(value, Staging())
        trained = next((n for n in self._names if self._owner.get(n) == name), None)
        if trained is not None:
            return self.get(trained)
        return self._merged(name.removesuffix(".weight"), value) if self._is_merged(name) else value

    def _merged(self, name: str, value: Tensor) -> Tensor:
        module: Any = self._model.get_submodule(name)
        empty = module._parameters["weight"]
        parts = {"weight": value.float(), A: self.get(f"{name}.{A}"), B: self.get(f"{name}.{B}")}
        module._parameters |= {key: nn.Parameter(part, requires_grad=False) for key, part in parts.items()}
        try:
            with torch.no_grad():
                add_product(module, self.addition.factor(name))
            merged: Tensor = module.weight.detach()
        finally:
            module._parameters |= {"weight": empty}
            for part in (A, B):
                module._parameters.pop(part)
        return merged

    def read_into(self, name: str, target: Tensor) -> None:
        target.copy_(self.read(name))

    def check(self) -> None:
        """Once every tensor was read: was it the base the adapter was trained on?

        Raises:
            CheckpointError: another one.
        """
        if not self.expected or set(self._sums) != set(self._specs):
            return
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            digest.update(line(name, self.dtype, parameter.shape, self._sums[name]))
        found = digest.hexdigest()[:16]
        if found != self.expected:
            raise CheckpointError(
                "an adapter on its base",
                f"a base with fingerprint {found}, and it was trained on one with {self.expected}",
                "on other weights it is another model",
                "put the weights of that time where they were",
            )

    def close(self) -> None:
        self.base.close()
        self._close()
