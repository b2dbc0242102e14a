"""A base and the adapter trained on it, read as one model: each weight is changed when its turn comes.

What an adapter's checkpoint holds is the addition alone; the base lies where it was loaded from. Read through here the
two are one set of tensors, so that scoring, generating and writing a merged model need neither of them whole. Of an
adapter with modules of its own only the base is read here; `found.Found.finish` attaches the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from skimp.adapters.handle import CodedMerging
from skimp.adapters.loftq import Fitted
from skimp.core.coded import Coded
from skimp.core.coded_model import is_transposed, linear_layers
from skimp.core.errors import CheckpointError, ConflictError
from skimp.core.registry import load
from skimp.core.structure import read_structure
from skimp.run.adapt import merging_of
from skimp.run.base import checksum, line
from skimp.run.skeleton import skeleton
from skimp.run.stored import Stored, names_for
from skimp.run.tensor_bytes import Spec, Staging
from skimp.run.weights import owners


class NoBase:
    """Stands where a base would, for an adapter whose own tensors are all of the model: shapes, and zeros nobody keeps.

    Args:
        model: without storage. dtype: of its weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._specs = {name: Spec(dtype, tuple(p.shape)) for name, p in named}

    def specs(self) -> Mapping[str, Spec]:
        return self._specs

    def read(self, name: str) -> Tensor:
        return torch.zeros(self._specs[name].shape, dtype=self._specs[name].dtype)

    def read_into(self, name: str, target: Tensor) -> None:
        target.zero_()

    def check(self) -> None:
        """There is nothing to hold it against."""

    def close(self) -> None:
        """There is no file."""


class AdaptedTensors:
    """The tensors of a base with an adapter merged in.

    Args:
        base: the base's own tensors.
        config: content of the model's HF config.json.
        dtype: what the base was held in while the adapter was trained; its tensors are rounded to it first.
        meta: what the adapter is (`Handle.meta`).
        names: names of the adapter's tensors, as in the model: "….q_proj.lora_A", "….embed_tokens.weight".
        get: one of them by name.
        expected: fingerprint of the base the adapter was trained on; "" where it is not known.
        close: closes what `get` reads from.
        codec: what the base's linear layers were kept in while the adapter was trained; they are read as they were
            seen then, decoded; `onto` chooses the original weights instead.
    """

    def __init__(
        self,
        base: Stored,
        config: dict[str, Any],
        dtype: torch.dtype,
        meta: Mapping[str, Any],
        names: Iterable[str],
        get: Callable[[str], Tensor],
        expected: str = "",
        close: Callable[[], None] = lambda: None,
        codec: Any = None,
    ) -> None:
        self.base, self.dtype, self.meta, self.expected = base, dtype, meta, expected
        self._names, self.get, self._close = frozenset(names), get, close
        self.method: Any = load(meta.get("name", "lora"), "adapter")
        self._model = skeleton(config, dtype)
        self.merging = merging_of(meta, self._names, get, self._model)
        changed = frozenset[str]() if self.merging is None else self.merging.changed
        targets: dict[str, Any] = dict(self._model.named_parameters(remove_duplicate=False))
        self._owner = owners(self._model)
        self.codec = self.kept_in = codec
        layers = {} if codec is None else linear_layers(self._model, read_structure(self._model))
        self._coded = {f"{name}.weight": module for name, module in layers.items()}
        self._written: dict[str, str] = {}
        for known, written in names_for(base, targets).items():
            if known == self._owner[known] or self._owner[known] not in self._written:
                self._written[self._owner[known]] = written
        self._changed = {self._owner[name] for name in changed}
        # A merged weight is float32 until it is written: its sum with the addition is rounded once.
        self._specs = {
            n: Spec(torch.float32 if n in self._changed else dtype, tuple(targets[n].shape)) for n in self._written
        }
        self._sums: dict[str, int] = {}

    def specs(self) -> Mapping[str, Spec]:
        """By the name in the model, tied tensors once."""
        return self._specs

    def onto(self, which: str) -> None:
        """Which weights the adapter goes on: "dequantised", those that training saw, or "original", those before.

        Raises:
            ConflictError: neither of the two, or a base that was never coded.
        """
        if self.kept_in is None or which not in ("dequantised", "original"):
            self.refuse_onto(which, known=self.kept_in is None)
        self.codec = self.kept_in if which == "dequantised" else None

    @staticmethod
    def refuse_onto(which: str, known: bool = True) -> NoReturn:
        """Refuse `--onto` where there is nothing to choose, or of an unknown word."""
        if known:
            found, why = "weights that were never in a codec", "there is one base to merge onto"
            raise ConflictError(f"--onto {which}", found, why, "leave --onto out")
        raise ConflictError(f"--onto {which}", "unknown", "", ["--onto dequantised", "--onto original"])

    def read(self, name: str) -> Tensor:
        """The base's tensor, replaced by what was trained in full, changed by what the adapter is."""
        value = self.base.read(self._written[name]).to(self.dtype)
        if self.expected and name not in self._sums:
            self._sums[name] = checksum(value, Staging())
        if isinstance(self.merging, Fitted):
            self.merging.coded = self.codec is not None
        trained = next((n for n in self._names if self._owner.get(n) == name), None)
        kept = None
        if trained is not None:
            value = self.get(trained)
        else:
            kept = self._kept(name, value)
        if trained is None and self.codec is not None and name in self._coded:
            value = self._decoded(name, value) if kept is None else self._turned(name, kept.dense())
        if self.merging is None or name not in self._changed:
            return value.to(self._specs[name].dtype)
        with torch.no_grad():
            if isinstance(self.merging, CodedMerging) and kept is not None:
                original = None if self.codec is not None else self._turned(name, value).float()
                return self._turned(name, self.merging.of_codes(name, kept, original))
            transposed = is_transposed(self._model.get_submodule(name.rpartition(".")[0]))
            return self.merging.apply(name, value.to(torch.float32, copy=True), transposed)

    def _decoded(self, name: str, value: Tensor) -> Tensor:
        """What training saw of a coded weight: in float32, or as rounded to the dtype that was computed in."""
        turned = is_transposed(self._coded[name])
        rows = value.t() if turned else value
        if isinstance(self.merging, Fitted) and name in self._changed:
            seen: Tensor = self.merging.seen(name, rows, self.codec, self.dtype)
        else:
            seen = self.codec.decode(self.codec.encode(rows), rows.shape, self.dtype)
        return (seen.t() if turned else seen).contiguous()

    def _kept(self, name: str, value: Tensor) -> Coded | None:
        """The codes that training saw of a weight, where the adapter is one of codes."""
        codec = self.kept_in
        if codec is None or name not in self._coded or not isinstance(self.merging, CodedMerging):
            return None
        rows = self._turned(name, value)
        if isinstance(self.merging, CodedMerging):
            own = self.merging.kept(name, codec, rows.shape, self.dtype)
            if own is not None:
                return own
        return Coded(codec.encode(rows), codec, rows.shape, self.dtype)

    def _turned(self, name: str, value: Tensor) -> Tensor:
        """From the layout of files to (outputs, inputs) and back: GPT-2's are stored the other way."""
        return value.t().contiguous() if is_transposed(self._coded[name]) else value

    def names(self) -> list[str]:
        """Of the adapter's own tensors."""
        return sorted(self._names)

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
