"""Every key of a recipe as plain data, from its JSON schema: for completion, and for recipes with comments."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: dotted, such as "train.lr".
        about: what the schema says of it, in one line.
        section: it holds keys of its own.
        choices: the values it takes by name, "true", "false" and "null" among them; empty where any value goes.
    """

    path: str
    about: str = ""
    section: bool = False
    choices: tuple[str, ...] = ()

    @property
    def above(self) -> str:
        """The section it is in; empty at the top."""
        return self.path.rpartition(".")[0]


def keys(schema: Mapping[str, Any]) -> list[Key]:
    """All keys, a section before what it holds, in the order of the schema."""
    return list(_below(schema, schema.get("$defs", {}), ""))


def _below(section: Mapping[str, Any], definitions: Mapping[str, Any], above: str) -> Iterator[Key]:
    for name, value in section.get("properties", {}).items():
        inner = held_section(value, definitions)
        about = value.get("description") or (inner or {}).get("description", "")
        choices = tuple(dict.fromkeys(_choices(value, definitions)))
        yield Key(
            above + name,
            " ".join(about.split()),
            inner is not None,
            choices,
        )
        if inner is not None:
            yield from _below(inner, definitions, f"{above}{name}.")


def held_section(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object a key may hold, behind references and alternatives."""
    if "$ref" in value:
        return held_section(definitions[value["$ref"].rpartition("/")[2]], definitions)
    if value.get("properties"):
        return value
    options = (*value.get("anyOf", ()), *value.get("allOf", ()), *value.get("oneOf", ()))
    return next((found for option in options if (found := held_section(option, definitions)) is not None), None)


def _choices(value: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in value:
        yield from _choices(definitions[value["$ref"].rpartition("/")[2]], definitions)
    for option in value.get("enum", ()):
        yield _written(option)
    if "const" in value:
        yield _written(value["const"])
    kinds = value.get("type", ())
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        if kind in ("boolean", "null"):
            yield from ("true", "false") if kind == "boolean" else ("null",)
    for option in (*value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _choices(option, definitions)


def _written(value: Any) -> str:
    """As one types it in YAML."""
    return value if isinstance(value, str) else json.dumps(value)
