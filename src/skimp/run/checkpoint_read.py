"""A complete checkpoint, read tensor by tensor into storage that is already there."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from skimp.core.errors import CheckpointError, DamagedCheckpoint, did_you_mean
from skimp.run.checkpoint_folder import STATE, problem, read_mark
from skimp.run.names import clean_name, storage_key
from skimp.run.safetensors_stream import SafetensorsReader
from skimp.run.tensor_bytes import Spec, aligned_empty


class Checkpoint:
    """A complete checkpoint, opened. Tensors are read one at a time and checked against their checksums.

    Attributes:
        path: its folder.
        step: optimizer steps done.
        meta: what was given to `save` (tuples come back as lists).
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        trouble = problem(self.path)
        if trouble:
            raise CheckpointError(
                f"loading {self.path}",
                trouble,
                "it is not a complete checkpoint",
                "use the newest complete one: --resume",
            )
        mark = read_mark(self.path)
        text = (self.path / STATE).read_bytes()
        if zlib.crc32(text) != mark["files"][STATE]["crc32"]:
            raise DamagedCheckpoint(
                f"loading {self.path}", f"{STATE} changed on disk", instead="go on from an older checkpoint"
            )
        state = json.loads(text)
        self.step: int = state["step"]
        self.meta: dict[str, Any] = state["meta"]
        self._aliases: dict[str, dict[str, str]] = state["aliases"]
        self._sums = {Path(name).stem: entry for name, entry in mark["files"].items() if name != STATE}
        self._readers: dict[str, SafetensorsReader] = {}

    @property
    def groups(self) -> list[str]:
        return list(self._sums)

    def names(self, group: str) -> list[str]:
        """The names written in a group, without the tied ones that were written under another name."""
        return list(self._reader(group).specs)

    def spec(self, group: str, name: str) -> Spec:
        """dtype and shape of a saved tensor; also knows tied names."""
        return self._reader(group).spec(self._written(group, name))

    def read(self, group: str, name: str) -> Tensor:
        """A new host tensor, 64-byte aligned."""
        spec = self.spec(group, name)
        tensor = aligned_empty(spec.shape, spec.dtype)
        self.read_into(group, name, tensor)
        return tensor

    def read_into(
        self,
        group: str,
        name: str,
        tensor: Tensor,
        passed: Callable[[Tensor], None] | None = None,
        cast: bool = False,
    ) -> None:
        """Fill `tensor` in place; `passed` is told of every piece that is filled; `cast` to its dtype.

        Raises:
            CheckpointError: unknown group or name, another shape, another dtype without `cast`, or bytes that changed
                on disk.
        """
        written, reader = self._written(group, name), self._reader(group)
        reader.spec(written)
        reader.read_into(written, tensor, self._sums[group]["tensors"][written], passed, cast)

    def read_all(self, group: str, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every target; each saved tensor must have a target and each target a saved tensor.

        Targets that share one storage (tied weights) need one of their names, and are read once.

        Raises:
            CheckpointError: lists all missing and all unexpected names before anything is read.
        """
        saved = set(self.names(group))
        reads: list[tuple[str, Tensor]] = []
        missing: list[tuple[str, Any]] = []
        source: dict[Any, str] = {}  # storage of a target -> the saved tensor it is filled from
        for raw_name, tensor in targets:
            written, key = self._written(group, raw_name), storage_key(tensor)
            if written not in saved:
                missing.append((clean_name(raw_name), key))
            elif key is None or key not in source:
                source[key] = written
                reads.append((written, tensor))
            elif source[key] != written:
                raise CheckpointError(
                    f"loading '{source[key]}' and '{written}' of {self.path}",
                    "one tied tensor in the run, two tensors in the checkpoint",
                    instead="build the run with the recipe the checkpoint was written with",
                )
        absent = sorted(name for name, key in missing if key is None or key not in source)
        extra = sorted(saved - {written for written, _ in reads})
        if absent or extra:
            raise CheckpointError(
                f"loading group '{group}' of {self.path}",
                "; ".join(filter(None, (_listed("missing", absent), _listed("unexpected", extra)))),
                "the run has other tensors than the one that was saved",
                "resume with the recipe it was written with, or start a new output folder",
            )
        for name, tensor in reads:
            self.read_into(group, name, tensor)

    def verify(self) -> None:
        """Read every tensor against its checksum, one buffer at a time.

        Raises:
            DamagedCheckpoint: names the first tensor whose bytes changed on disk.
        """
        for group in self.groups:
            reader = self._reader(group)
            for name in reader.names():
                reader.verify(name, self._sums[group]["tensors"][name])

    def _written(self, group: str, name: str) -> str:
        name = clean_name(name)
        return self._aliases.get(group, {}).get(name, name)

    def _reader(self, group: str) -> SafetensorsReader:
        if group not in self._sums:
            raise CheckpointError(
                f"group '{group}' of {self.path}", "no such group", instead=did_you_mean(group, self._sums)
            )
        if group not in self._readers:
            reader = SafetensorsReader(self.path / f"{group}.safetensors")
            if reader.header_sum != self._sums[group]["header"]:
                reader.close()
                raise DamagedCheckpoint(
                    f"loading {reader.path}",
                    "its header changed on disk",
                    instead="go on from an older checkpoint",
                )
            self._readers[group] = reader
        return self._readers[group]

    def close(self) -> None:
        """Close the files. Also done by `with`."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{len(names)} {what}: {', '.join(names[:20])}{', …' if len(names) > 20 else ''}"


def load(path: Path) -> Checkpoint:
    """Open one checkpoint folder.

    Raises:
        CheckpointError: it is incomplete (and why), damaged, or written by a newer skimp.
    """
    return Checkpoint(path)
