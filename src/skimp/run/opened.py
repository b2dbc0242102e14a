"""The one place that opens any model for use: a run, a checkpoint, an export, a Hugging Face folder, a GGUF, a preset.

`find` settles what was meant and where its config, tokenizer and tensors are; no tensor is read. `open_model` gives it
storage and fills it, tensor by tensor. Whatever evaluates, generates or exports begins here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skimp.core.errors import CheckpointError, ModelError, SkimpError, did_you_mean
from skimp.core.structure import TESTED_FAMILIES, Structure, read_structure
from skimp.kernels.apply import Fused
from skimp.run.adapt import adapt
from skimp.run.adapted import AdaptedTensors
from skimp.run.build import DTYPES, check_path
from skimp.run.checkpoint_folder import STATE, best_checkpoint, complete_steps, latest, step_name
from skimp.run.checkpoint_read import Checkpoint
from skimp.run.folder import RUN
from skimp.run.head import Head
from skimp.run.skeleton import materialise, skeleton
from skimp.run.stored import CheckpointTensors, Stored, open_stored
from skimp.run.weights import fill_from

#: What a user may ask to compute in. Half precision is left out: a CPU has no arithmetic for it.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


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

    def close(self) -> None:
        """Close the files."""
        self.stored.close()

    def __enter__(self) -> Found:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Opened:
    """A model with its weights in memory, in evaluation mode; no parameter asks for a gradient."""

    found: Found
    model: nn.Module
    structure: Structure
    head: Head
    dtype: torch.dtype


def find(asked: str, checkpoint: str | None = None) -> Found:
    """Find a model by whatever a person calls it.

    Args:
        asked: a run's folder, one of its checkpoints, an exported or any Hugging Face folder, a .gguf file, a preset, a
            Hub id.
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
        stored: Stored = CheckpointTensors(saved) if recipe.adapter is None else _on_base(source, recipe, saved)
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


def _on_base(source: Any, recipe: Any, saved: Checkpoint) -> Stored:
    """The adapter of a checkpoint on the base it was trained on, which is loaded from its own source."""
    from skimp.recipe import fetch_model

    if recipe.model.init == "scratch":
        raise ModelError(
            f"the adapter in {saved.path}",
            "a base drawn at random (model.init=scratch)",
            "a random base is made in memory when a run begins, and lies nowhere to be read from",
            "train the model itself, or an adapter on weights that are kept",
        )
    here = fetch_model(source)
    dtype = DTYPES[recipe.precision]
    base = open_stored(here.weights, skeleton(source.config, dtype).config)
    names = set(saved.names("adapter"))
    model = skeleton(source.config, dtype)
    handle = adapt(model, read_structure(model), recipe)
    assert handle is not None
    return AdaptedTensors(
        base,
        source.config,
        dtype,
        handle.spec,
        names,
        lambda name: saved.read("adapter", name),
        saved.meta.get("base", ""),
        saved.close,
    )


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


def settle_dtype(found: Found, precision: str | None) -> torch.dtype:
    """What to compute in: as asked, as the run computed, or as the weights are stored (half precision as float32).

    Raises:
        ModelError: an unknown precision.
    """
    if precision is not None:
        if precision not in PRECISIONS:
            raise ModelError(f"precision {precision}", "unknown", instead=did_you_mean(precision, PRECISIONS))
        return PRECISIONS[precision]
    if found.recipe is not None:
        return DTYPES[found.recipe.precision]
    specs = found.stored.specs().values()
    widest = max(specs, key=lambda spec: spec.nbytes).dtype
    return torch.bfloat16 if widest == torch.bfloat16 else torch.float32


def open_model(
    found: Found, precision: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Opened:
    """Load the weights, tensor by tensor, ready for evaluation and generation. Peak = the model + one tensor.

    Args:
        found: from `find`; it may be closed afterwards.
        precision: "fp32" or "bf16"; None as `settle_dtype` says.
        progress: called with (tensors filled, tensors).

    Raises:
        ModelError: a missing or misshapen tensor, or a family whose head is not understood.
    """
    dtype = settle_dtype(found, precision)
    model = skeleton(found.config, dtype)
    structure = read_structure(model)
    materialise(model, dtype, lambda shape, kind: torch.empty(shape, dtype=kind))
    model.requires_grad_(False)
    fill_from(model, found.stored, found.asked, progress)
    found.stored.check()
    if structure.family not in TESTED_FAMILIES:
        check_path(model, structure)
    return dress(found, model, structure, dtype, precision)


def dress(found: Found, model: nn.Module, structure: Structure, dtype: torch.dtype, precision: str | None) -> Opened:
    """Fused layers where they are built, as in training, and the head; evaluation mode."""
    mixed = precision is None and found.recipe is not None and found.recipe.precision == "bf16-mixed"
    if found.recipe is None or found.recipe.exact.kernels != "plain":
        Fused(model)
    model.eval()
    return Opened(found, model, structure, Head(model, structure, autocast=mixed), dtype)
