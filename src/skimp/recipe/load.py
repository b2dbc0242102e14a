"""`load_recipe`: a file or a dict, then `key=value` overrides, then one validation that reports it all."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from skimp.core.errors import RecipeError
from skimp.recipe.document import Document, parse_value, read_document
from skimp.recipe.explain import problems, shown
from skimp.recipe.log import opened
from skimp.recipe.problem import RecipeErrors
from skimp.recipe.schema import Recipe

#: Sections that may be written as one word, and the key that word is: an override below them opens the word
#: up.
ONE_WORD = {"model": "name", "optimizer": "name", "adapter": "name", "model.weights": "name"}


def load_recipe(source: str | PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        source: path of a YAML file, or the same as a mapping.
        overrides: `a.b.c=value` each; the value is YAML, so `train.steps=20`, `exact.recompute=[0, 1]`,
            `eval=null`. The last one for a key wins.

    Raises:
        RecipeError: the file cannot be read, an override is malformed, or keys are unknown, of the wrong
            type, out of range or contradict each other; names every one of them.
    """
    if isinstance(source, Mapping):
        document = Document(copy.deepcopy(dict(source)), "the recipe")
    else:
        document = read_document(str(source))
    values, lines = document.values, dict(document.lines)
    for text in overrides:
        key, value = override(values, text)
        lines |= dict.fromkeys(_nested(value, key), f"from the command line: {text}")
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeErrors(document.origin, problems(error, Recipe, lines)) from None


def override(values: dict[str, Any], text: str) -> tuple[str, Any]:
    """Put `a.b.c=value` into nested values, in place; returns the dotted key and the value.

    Raises:
        RecipeError: no equals sign, no key, a value that is not YAML, or a key below something that is no
            section.
    """
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not key or any(not part.strip() for part in key.split(".")):
        raise RecipeError(f"override '{text}'", "no key=value", instead="write it as train.steps=20")
    value = parse_value(written, f"override '{text}'")
    *path, last = key.split(".")
    inner = values
    for depth, part in enumerate(path):
        here = ".".join(path[: depth + 1])
        below = inner.get(part)
        if below is None:
            below = {}
        elif here in ONE_WORD and isinstance(below, str):
            below = {ONE_WORD[here]: below}
        elif here == "log" and isinstance(below, (str, list)):
            below = _loggers(below, text)
        elif not isinstance(below, dict):
            raise RecipeError(
                f"override '{text}'",
                f"{here} is {shown(below)}",
                f"it has no key '{path[depth + 1] if depth + 1 < len(path) else last}'",
                f"set {here} as a whole, such as {here}={{{last}: {written}}}",
            )
        inner[part] = below
        inner = below
    inner[last] = value
    return key, value


def _loggers(value: Any, text: str) -> dict[str, Any]:
    """`log` written as names, opened for an override below it."""
    try:
        return opened(value)
    except PydanticCustomError as error:
        context = error.context or {}
        raise RecipeError(f"override '{text}'", f"log: {shown(value)}", "", str(context.get("instead", ""))) from None


def _nested(value: Any, key: str) -> list[str]:
    """The dotted key of an override and, where its value is a mapping, every key below it."""
    below = value.items() if isinstance(value, dict) else ()
    return [key, *(inner for name, part in below for inner in _nested(part, f"{key}.{name}"))]
