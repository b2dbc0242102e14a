"""Where a model comes from: the record a recipe's `model:` becomes, and the files it is read from."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skimp.core.errors import ModelError
from skimp.recipe.catalogue import Preset
from skimp.recipe.families import parameter_count

Kind = Literal["preset", "folder", "config", "gguf", "hub", "wheel"]


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: what `name` turned out to be.
        name: as the recipe says it.
        config: the HF config JSON.
        init: "pretrained" or "scratch".
        weights: folder with safetensors, or a .gguf file; None when there are none here (yet).
        tokenizer: folder or .gguf file; None when there is none here (yet).
        hub: Hub id of the weights; None when they are not on the Hub.
        tokenizer_hub: Hub id of the tokenizer.
        revision: the commit where it is known, else what the recipe says.
        why: one sentence on how `name` was understood, for the plan to print.
    """

    kind: Kind
    name: str
    config: dict[str, Any]
    init: str = "pretrained"
    weights: Path | None = None
    tokenizer: Path | None = None
    hub: str | None = None
    tokenizer_hub: str | None = None
    revision: str | None = None
    why: str = ""

    @property
    def parameters(self) -> int | None:
        """Parameters by the config's shapes, tied weights once; None for a family outside the table."""
        return parameter_count(self.config)


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as a dict.

    Raises:
        ModelError: not UTF-8, not JSON (with the line), or not an object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ModelError(f"model config {path}", "not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"model config {path}, line {error.lineno}", f"not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise ModelError(f"model config {path}", f"a JSON {type(config).__name__}, not an object")
    return config


def tokenizer_in(folder: Path) -> Path | None:
    known = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
    return folder if any((folder / name).is_file() for name in known) else None


def wheel_gguf(preset: Preset) -> Path | None:
    """The .gguf inside the preset's wheel; the package is looked up, never imported."""
    if preset.wheel is None:
        return None
    try:
        files = importlib.metadata.files(preset.wheel["package"]) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in found if path.is_file()), None)
