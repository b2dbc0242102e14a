"""The text a model is scored on: the held-out sets of its run, or files a person names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skimp.core.errors import DataError, ModelError
from skimp.data import prepare
from skimp.recipe.families import max_positions
from skimp.run.found import Found
from skimp.run.prepare import text_data


@dataclass(frozen=True)
class HeldOut:
    """Sets of rows by name, and the length of a row."""

    sets: dict[str, Any]
    seq_len: int


def held_out(
    found: Found,
    files: Sequence[str],
    overrides: Sequence[str] = (),
    progress: Callable[[dict[str, Any]], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> HeldOut:
    """Tokenise in a child process what is not in the cache; by the rules of the run, or a recipe's own.

    Args:
        found: the model; a run brings its recipe.
        files: what to score; empty takes the run's held-out text.
        overrides: key=value of the recipe.
        progress, say: told of tokenising, and of what became of every row.

    Raises:
        DataError: no text to score, a missing or malformed file.
        ModelError: rows longer than the model's positions.
        RecipeError: an override is wrong.
    """
    recipe = _recipe(found, files, overrides)
    data = text_data(recipe)
    limit = max_positions(found.config)
    if limit is not None and data.seq_len > limit and recipe.model.positions != "extend":
        raise ModelError(
            f"rows of {data.seq_len} tokens with {found.asked}",
            f"the model has {limit} positions",
            "beyond them it was never trained",
            [f"--seq {limit}", "model.positions=extend, for rotary models, knowingly"],
        )
    if files:
        # Every document of the files is scored, none is split off.
        data = replace(data, train=list(files), validation=None, validation_tokens=None, streaming=False)
    prepared = prepare(data, found.tokenizer, vocabulary=found.config["vocab_size"], progress=progress)
    for line in prepared.report.lines():
        say(line)
    if files:
        return HeldOut({", ".join(files): prepared.train}, data.seq_len)
    if not prepared.validations:
        raise DataError(
            f"held-out text of {found.asked}",
            "its recipe holds none out (data.validation=null)",
            instead="name some: --data FILE",
        )
    return HeldOut(dict(prepared.validations), data.seq_len)


def _recipe(found: Found, files: Sequence[str], overrides: Sequence[str]) -> Any:
    from skimp.recipe import load_recipe

    if found.recipe is not None:
        return load_recipe(found.recipe.as_dict(), overrides)
    if not files:
        raise DataError(
            f"held-out text for {found.asked}",
            "no run, so no text of its own",
            instead=["name some: --data FILE", "--data pydoc: the language reference that ships with Python"],
        )
    limit = max_positions(found.config)
    length = 512 if limit is None else min(512, limit)
    described = {"model": found.asked, "data": {"train": list(files), "seq_len": length}, "output": "unused"}
    return load_recipe({**described, "train": {"steps": 1}}, overrides)
