"""Any model by what a person calls it: where its config, tokenizer and tensors are; no tensor is read.

A run, a checkpoint, an export, a Hugging Face folder, an adapter's folder, a GGUF, a preset, a Hub id: whatever
evaluates, generates or exports begins here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skimp.adapters.folder import FACTS, read_facts
from skimp.adapters.folder import TENSORS as OWN_TENSORS
from skimp.core.codecs import from_meta
from skimp.core.errors import CheckpointError, ModelError, SkimpError
from skimp.core.registry import load
from skimp.core.structure import Structure, read_structure
from skimp.run.adapt import put_back
from skimp.run.adapted import AdaptedTensors, NoBase
from skimp.run.build import DTYPES
from skimp.run.checkpoint_folder import STATE, best_checkpoint, complete_steps, latest, step_name
from skimp.run.checkpoint_read import Checkpoint
from skimp.run.coded_base import weight_codec
from skimp.run.coded_tensors import CodedTensors
from skimp.run.folder import RUN
from skimp.run.safetensors_stream import SafetensorsReader
from skimp.run.skeleton import skeleton
from skimp.run.stored import CheckpointTensors, Stored, open_stored


@dataclass
class Found:
    """A model that was found, its tensors still on disk.

    Attributes:
        asked: what the user named.
        kind: "run", "checkpoint", or what kind of model source it is ("folder", "gguf", "wheel", "hub", "preset").
        config: content of its HF config.json.
        tokenizer: folder, tokenizer.json or GGUF file.
        stored: its tensors.
        why: how it was understood, one sentence.
        recipe: of a run, else None; `step`, `folder`: its optimizer steps and its own folder.
        revision: commit of the base model, where it is known.
    """

    asked: str
    kind: str
    config: dict[str, Any]
    tokenizer: Path
    stored: Stored
    why: str
    recipe: Any = None
    step: int | None = None
    folder: Path | None = None
    revision: str | None = None
    meta: dict[str, Any] | None = None

    def finish(self, model: nn.Module, structure: Structure) -> None:
        """Once the model holds the tensors: attach an adapter that is no change of weights."""
        if isinstance(self.stored, AdaptedTensors) and self.stored.merging is None:
            put_back(model, structure, self.stored.meta, self.stored.get).freeze()

    def weights_alone(self, what: str) -> None:
        """Refuse `what` where weights alone are not the model.

        Raises:
            ConflictError: an adapter with modules of its own.
        """
        if isinstance(self.stored, AdaptedTensors) and self.stored.merging is None:
            raise self.stored.method.no_weights(what)

    def close(self) -> None:
        """Close the files."""
        self.stored.close()

    def __enter__(self) -> Found:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find(asked: str, checkpoint: str | None = None) -> Found:
    """Find a model by whatever a person calls it.

    Args:
        asked: a run's folder, one of its checkpoints, an exported or any Hugging Face folder, the folder of an adapter
            in PEFT's format, a .gguf file, a preset, a Hub id.
        checkpoint: of a run: a step's number or folder name, or "best"; None takes the newest complete one.

    Raises:
        CheckpointError: no such checkpoint, or none that is complete; names those there are.
        ModelError: nothing of that name, no weights or no tokenizer, or a quantised model.
    """
    path = Path(asked).expanduser()
    if (path / STATE).is_file():
        return _from_checkpoint(asked, path, path.parent.parent, "checkpoint")
    if (path / RUN).is_file() or (path / "recipe.json").is_file():
        return _from_checkpoint(asked, _chosen(path, checkpoint), path, "run")
    if checkpoint is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint} of {asked}", "not the folder of a run", "only a run has checkpoints"
        )
    if (path / FACTS).is_file():
        return _from_own(asked, path)
    if (path / "adapter_config.json").is_file():
        return _from_peft(asked, path)
    return _from_source(asked)


def _chosen(run: Path, checkpoint: str | None) -> Path:
    root = run / "checkpoints"
    steps, broken = complete_steps(root) if root.is_dir() else ([], [])
    if checkpoint is None:
        found = latest(root)
    elif checkpoint == "best":
        found = best_checkpoint(root)
    else:
        name = step_name(int(checkpoint)) if checkpoint.isdecimal() else Path(checkpoint).name
        found = next((step for step in steps if step.name == name), None)
    if found is not None:
        return found
    there = ", ".join(s.name for s in steps)
    raise CheckpointError(
        f"checkpoint '{checkpoint}' of the run in {run}" if checkpoint else f"a model from the run in {run}",
        f"complete checkpoints: {there}" if there else "no complete checkpoint" + "".join(f"; {b}" for b in broken),
        "" if there else "the run ended before its first save, or saves nothing (checkpoint.at_end=false)",
        [f"--checkpoint {steps[-1].name}"] if steps else [f"skimp train {run} --resume"],
    )


def _from_checkpoint(asked: str, path: Path, run: Path, kind: str) -> Found:
    from skimp.recipe import load_recipe, resolve_model

    saved = Checkpoint(path)
    try:
        recipe = load_recipe(saved.meta["recipe"])
        revision = saved.meta.get("revision")
        try:
            source = resolve_model(recipe.model, revision=revision)
            tokenizer = _tokenizer(source)
        except SkimpError as error:
            raise ModelError(
                f"the tokenizer of {asked}",
                f"{error.asked}: {error.found}",
                "a checkpoint holds weights; config and tokenizer are those of the model it was trained from",
                [f"put model '{recipe.model.name}' back where it was", *error.instead],
            ) from error
        read = _trained_alone if recipe.adapter is None else _on_base
        stored = read(source, recipe, saved)
        what = f"step {saved.step} of the run in {run}"
        return Found(
            asked,
            kind,
            source.config,
            tokenizer,
            stored,
            what if recipe.adapter is None else f"{what}, its adapter merged into {recipe.model.name}",
            recipe,
            saved.step,
            run,
            revision,
            saved.meta,
        )
    except BaseException:
        saved.close()
        raise


def _trained_alone(source: Any, recipe: Any, saved: Checkpoint) -> Stored:
    """The model of a checkpoint that trained all of it; weights that trained in codes as training saw them."""
    codec = weight_codec(recipe)
    if codec is None:
        return CheckpointTensors(saved)
    dtype = DTYPES[recipe.precision]
    return CodedTensors(saved, skeleton(source.config, dtype), codec, dtype)


def _on_base(source: Any, recipe: Any, saved: Checkpoint) -> Stored:
    """The adapter of a checkpoint on the base it was trained on, which is loaded from its own source."""
    from skimp.recipe import fetch_model

    dtype = DTYPES[recipe.precision]
    meta = saved.meta["adapter"]
    whole = load(meta.get("name", "lora"), "adapter").whole
    if recipe.model.init == "scratch" and not whole:
        raise ModelError(
            f"the adapter in {saved.path}",
            "a base drawn at random (model.init=scratch)",
            "a random base is made in memory when a run begins, and lies nowhere to be read from",
            "train the model itself, or an adapter on weights that are kept",
        )
    base: Stored = NoBase(skeleton(source.config, dtype), dtype)
    if not whole:
        here = fetch_model(source)
        assert here.weights is not None
        base = open_stored(here.weights, skeleton(source.config, dtype).config)
    return AdaptedTensors(
        base,
        source.config,
        dtype,
        meta,
        saved.names("adapter"),
        lambda name: saved.read("adapter", name),
        "" if whole else saved.meta.get("base", ""),
        saved.close,
        weight_codec(recipe),
    )


def _from_peft(asked: str, path: Path) -> Found:
    """An adapter's folder in PEFT's format, on the base it names."""
    from skimp.export.peft import BASE_KEY, CODEC_KEY, TENSORS, read_config, read_spec, saved_shapes, written_name
    from skimp.recipe import fetch_model, resolve_model

    named = read_config(path).get("base_model_name_or_path")
    try:
        source = fetch_model(resolve_model(str(named)))
    except SkimpError as error:
        raise ModelError(
            f"the adapter in {path}",
            f"its base '{named}': {error.found}",
            "an adapter is an addition to that very model",
            [f"put '{named}' back where it was", *error.instead],
        ) from error
    reader = SafetensorsReader(path / TENSORS)
    noted = reader.metadata.get(BASE_KEY, "").split()
    dtype = torch.bfloat16 if noted[1:] == ["bfloat16"] else torch.float32
    model = skeleton(source.config, dtype)
    addition = read_spec(path, model, read_structure(model), dropout=0.0, seed=0, full=(False, False))
    assert source.weights is not None
    assert source.tokenizer is not None
    stored = AdaptedTensors(
        open_stored(source.weights, model.config),
        source.config,
        dtype,
        addition.as_dict(),
        saved_shapes(path),
        lambda name: reader.read(written_name(name)),
        noted[0] if len(noted) == 2 else "",
        reader.close,
        from_meta(json.loads(reader.metadata[CODEC_KEY])) if CODEC_KEY in reader.metadata else None,
    )
    what = f"the adapter in {path}, merged into {named}"
    return Found(asked, "adapter", source.config, source.tokenizer, stored, what, revision=source.revision)


def _from_own(asked: str, path: Path) -> Found:
    """An adapter's folder in skimp's own format, on the base it names."""
    from skimp.recipe import fetch_model, resolve_model

    facts = read_facts(path)
    meta, noted = facts["adapter"], facts["base"]
    try:
        source = fetch_model(resolve_model(str(noted["name"])))
    except SkimpError as error:
        raise ModelError(
            f"the adapter in {path}",
            f"its base '{noted['name']}': {error.found}",
            "an adapter goes on that very model",
            [f"put '{noted['name']}' back where it was", *error.instead],
        ) from error
    dtype = DTYPES[noted.get("precision", "fp32")]
    whole = load(meta["name"], "adapter").whole
    model = skeleton(source.config, dtype)
    assert source.weights is not None
    assert source.tokenizer is not None
    reader = SafetensorsReader(path / OWN_TENSORS)
    stored = AdaptedTensors(
        NoBase(model, dtype) if whole else open_stored(source.weights, model.config),
        source.config,
        dtype,
        meta,
        reader.names(),
        reader.read,
        "" if whole else noted.get("fingerprint", ""),
        reader.close,
        None if noted.get("codec") is None else from_meta(noted["codec"]),
    )
    what = f"the adapter in {path}, on {noted['name']}"
    return Found(asked, "adapter", source.config, source.tokenizer, stored, what, revision=source.revision)


def _from_source(asked: str) -> Found:
    from skimp.recipe import fetch_model, resolve_model

    source = fetch_model(resolve_model(asked))
    if source.config.get("quantization_config"):
        method = source.config["quantization_config"].get("quant_method", "an unknown method")
        raise ModelError(
            f"model '{asked}'",
            f"weights quantised with {method}",
            "they are packed in that package's own layout",
            "the unquantised model it was made from, or its GGUF",
        )
    assert source.weights is not None
    assert source.tokenizer is not None
    stored = open_stored(source.weights, skeleton(source.config, torch.float32).config)
    return Found(asked, source.kind, source.config, source.tokenizer, stored, source.why, revision=source.revision)


def _tokenizer(source: Any) -> Path:
    """The tokenizer alone: weights come from the checkpoint."""
    from skimp.recipe import fetch_model

    found = fetch_model(replace(source, init="scratch")).tokenizer
    assert found is not None
    return found
