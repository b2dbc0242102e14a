"""Weights where they lie: names, dtypes and shapes at once, the tensors one at a time when they are asked for.

A folder of safetensors, a GGUF file and a checkpoint look the same from here, so that what opens a model, what
measures it and what writes it elsewhere know nothing of formats and never hold more than one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skimp.core.errors import ModelError
from skimp.run.checkpoint_read import Checkpoint
from skimp.run.gguf_tensors import GgufTensors
from skimp.run.safetensors_stream import SafetensorsReader
from skimp.run.tensor_bytes import Spec


class Stored(Protocol):
    """Tensors by the name they are written under."""

    def specs(self) -> Mapping[str, Spec]:
        """dtype and shape of every tensor, in the order that reads fastest."""

    def read(self, name: str) -> Tensor:
        """One tensor, new, on the host."""

    def read_into(self, name: str, target: Tensor) -> None:
        """The same into a tensor of that shape that is there already, cast to its dtype."""

    def check(self) -> None:
        """Called once all tensors were read: does what was read belong together?"""

    def close(self) -> None:
        """Close the files."""


class SafetensorsFolder:
    """A model folder's safetensors, whole or in shards; or one such file."""

    def __init__(self, source: Path) -> None:
        self._readers: dict[str, SafetensorsReader] = {}
        self._specs: dict[str, Spec] = {}
        try:
            for file in _files(source):
                reader = SafetensorsReader(file)
                for name in reader.names():
                    self._readers[name] = reader
                    self._specs[name] = reader.spec(name)
        except BaseException:
            self.close()
            raise

    def specs(self) -> Mapping[str, Spec]:
        return self._specs

    def read(self, name: str) -> Tensor:
        return self._readers[name].read(name)

    def read_into(self, name: str, target: Tensor) -> None:
        self._readers[name].read_into(name, target, cast=True)

    def check(self) -> None:
        """Nothing to hold against each other."""

    def close(self) -> None:
        for reader in {id(r): r for r in self._readers.values()}.values():
            reader.close()


class CheckpointTensors:
    """The model of one of skimp's checkpoints; tied tensors under the one name they were written with."""

    def __init__(self, saved: Checkpoint) -> None:
        self.saved = saved
        self._specs = {name: saved.spec("model", name) for name in saved.names("model")}

    def specs(self) -> Mapping[str, Spec]:
        return self._specs

    def read(self, name: str) -> Tensor:
        return self.saved.read("model", name)

    def read_into(self, name: str, target: Tensor) -> None:
        self.saved.read_into("model", name, target, cast=True)

    def check(self) -> None:
        """Each tensor was held against its checksum as it was read."""

    def close(self) -> None:
        self.saved.close()


def open_stored(source: Path, config: Any) -> Stored:
    """The weights of a model folder, a .safetensors or a .gguf file.

    Args:
        source: where they are.
        config: the model's HF config object, which a GGUF file's layout needs.

    Raises:
        ModelError: none there, a missing shard, or a GGUF of a family that is not known.
    """
    return GgufTensors(source, config) if source.suffix == ".gguf" else SafetensorsFolder(source)


def names_for(stored: Stored, wanted: Mapping[str, Any]) -> dict[str, str]:
    """Model name -> written name, for every written tensor the model has.

    Base-model files lack the 'model.' or 'transformer.' of the causal LM; it is added where that makes a match.
    """
    found: dict[str, str] = {}
    for written in stored.specs():
        options = (written, f"model.{written}", f"transformer.{written}")
        known = next((name for name in options if name in wanted), None)
        if known is not None:
            found[known] = written
    return found


def _files(source: Path) -> list[Path]:
    if not source.is_dir():
        files = [source]
    elif (index := source / "model.safetensors.index.json").exists():
        files = [source / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = sorted(source.glob("*.safetensors"))
    absent = [f for f in files if not f.exists()]
    if not files or absent:
        raise ModelError(
            f"safetensors weights in {source}",
            f"missing {absent[0].name}" if absent else "none",
            "pickled .bin weights are not read: they can run code",
            "save the model with safetensors",
        )
    return files
