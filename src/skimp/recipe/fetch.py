"""What a run needs beyond the config: weights and tokenizer here, and a recipe that the model can hold."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from skimp.core.errors import ModelError
from skimp.recipe.families import layer_count, learned_positions, max_positions
from skimp.recipe.hub import MODEL_FILES, TOKENIZER_FILES, commit_of, hub_folder
from skimp.recipe.schema import Recipe
from skimp.recipe.source import ModelSource, tokenizer_in


def fetch_model(source: ModelSource) -> ModelSource:
    """The source with weights (unless init is scratch) and tokenizer on this machine, downloading where
    needed.

    Raises:
        ModelError: there are no weights to be had, the Hub cannot be reached, or the package to read GGUF
            is missing.
    """
    if source.init == "pretrained" and source.weights is None:
        if source.hub is None:
            raise ModelError(
                f"model '{source.name}' with pretrained weights",
                f"none: {source.why}",
                instead=[
                    "model.init=scratch to draw them at random",
                    "a Hub id, a folder with safetensors, a .gguf file",
                ],
            )
        folder = hub_folder(source.hub, source.revision, [*MODEL_FILES, *TOKENIZER_FILES])
        if not any(folder.glob("*.safetensors")):
            raise ModelError(
                f"model '{source.name}' with pretrained weights",
                f"no .safetensors in {source.hub}",
                "pickled weights can run code when loaded, so they are not read",
                "convert them to safetensors",
            )
        source = replace(
            source,
            weights=folder,
            tokenizer=source.tokenizer or tokenizer_in(folder),
            revision=commit_of(folder / "config.json") or source.revision,
        )
    if source.tokenizer is None and source.tokenizer_hub is not None:
        revision = source.revision if source.tokenizer_hub == source.hub else None
        source = replace(source, tokenizer=tokenizer_in(hub_folder(source.tokenizer_hub, revision, TOKENIZER_FILES)))
    if source.tokenizer is None:
        raise ModelError(
            f"model '{source.name}': a tokenizer",
            f"none: {source.why}",
            instead="put tokenizer.json beside config.json",
        )
    if ".gguf" in {p.suffix for p in (source.weights, source.tokenizer) if p} and not importlib.util.find_spec("gguf"):
        raise ModelError(
            f"model '{source.name}'",
            "the package gguf is not installed",
            "weights and tokenizer are in a .gguf file",
            "pip install 'skimp[gguf]'",
        )
    return source


def check_model(recipe: Recipe, source: ModelSource) -> None:
    """What only model and recipe together can show: the sequence fits the positions, pinned blocks exist.

    Raises:
        ModelError: with the sequence length or the blocks that would do.
    """
    limit, seq_len = max_positions(source.config), recipe.data.seq_len
    if limit is not None and seq_len > limit:
        table = learned_positions(source.config)
        if recipe.model.positions == "strict" or table:
            raise ModelError(
                f"data.seq_len {seq_len} with model '{source.name}'",
                f"the model has {limit} positions",
                "its positions are a table with no rows beyond that" if table else "it was not trained beyond them",
                [
                    f"data.seq_len={limit}",
                    *([] if table else ["model.positions=extend to train longer ones knowingly"]),
                ],
            )
    blocks, pinned = layer_count(source.config), recipe.exact.recompute
    most = pinned if isinstance(pinned, int) else max(pinned, default=-1) + 1 if isinstance(pinned, tuple) else 0
    if blocks is not None and most > blocks:
        raise ModelError(
            f"exact.recompute {pinned if isinstance(pinned, int) else list(pinned or ())} with model '{source.name}'",
            f"the model has {blocks} blocks, 0 to {blocks - 1}",
            instead="exact.recompute=all",
        )
