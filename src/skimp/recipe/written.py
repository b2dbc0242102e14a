"""A recipe as a file a person reads: YAML with each key explained in the schema's own words, so they cannot drift."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from skimp.core.errors import RecipeError
from skimp.recipe.keys import Key, keys
from skimp.recipe.schema import json_schema

WIDTH = 100


def written(values: Mapping[str, Any], notes: Mapping[str, str] | None = None, heading: Sequence[str] = ()) -> str:
    """YAML text of nested values, every key under its description.

    Args:
        values: as a recipe file holds them; keys in the order in which they are to stand.
        notes: dotted key -> a sentence on why it has this value, after its description.
        heading: lines above everything, without their comment sign.

    Raises:
        RecipeError: a key that the schema does not know.
    """
    known = {key.path: key for key in keys(json_schema())}
    lines = [f"# {line}".rstrip() for line in heading]
    lines += _section(values, "", known, notes or {})
    return "\n".join(lines) + "\n"


def _section(
    values: Mapping[str, Any], above: str, known: Mapping[str, Key], notes: Mapping[str, str]
) -> Iterator[str]:
    depth = above.count(".")
    indent = "  " * depth
    for name, value in values.items():
        path = above + name
        if path not in known:
            raise RecipeError(f"{path}: a key of the recipe", "no such key")
        if depth == 0:
            yield ""
        about = known[path].about
        for text in (about, notes.get(path, "")):
            yield from (
                f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent), break_on_hyphens=False)
            )
        if isinstance(value, Mapping) and known[path].section:
            yield f"{indent}{name}:"
            yield from _section(value, f"{path}.", known, notes)
        else:
            yield f"{indent}{name}: {scalar(value)}"


def scalar(value: Any) -> str:
    """A value on one line, as YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).strip()
    return text.removesuffix("...").strip()
