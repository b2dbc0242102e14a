"""Reading a recipe's text: YAML, with the line of every key, duplicates refused, nothing but plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from skimp.core.errors import RecipeError, did_you_mean


@dataclass(frozen=True)
class Document:
    """The plain values of a recipe, and where each dotted key is written."""

    values: dict[str, Any]
    origin: str
    lines: dict[str, str] = field(default_factory=dict)


def read_document(path: str | Path) -> Document:
    """Read a YAML recipe.

    Raises:
        RecipeError: no such file (with near names), not UTF-8, not YAML (file and line), a key written
            twice (both lines), empty, or not a mapping at the top.
    """
    path = Path(path)
    if path.is_dir():
        inside = sorted(p.name for p in path.glob("*.y*ml"))
        raise RecipeError(f"recipe {path}", "a folder", instead=[str(path / name) for name in inside[:3]])
    if not path.is_file():
        folder = path.parent
        names = [p.name for p in folder.glob("*.y*ml")] if folder.is_dir() else []
        found = "no such file" if folder.is_dir() else f"no such folder: {folder}"
        raise RecipeError(f"recipe {path}", found, instead=did_you_mean(path.name, names) if names else ())
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"recipe {path}",
            f"byte {error.object[error.start]:#04x} at offset {error.start} is not UTF-8",
            instead="save the file as UTF-8",
        ) from None
    return parse_document(text, str(path))


def parse_document(text: str, origin: str) -> Document:
    """Parse YAML text; `origin` names it in errors."""
    root = _compose(text, origin)
    if root is None:
        raise RecipeError(f"recipe {origin}", "an empty file", instead="at least model, data.train and output")
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(f"recipe {origin}", f"{_shown(root)} at the top", "a recipe is a mapping of keys to values")
    lines: dict[str, str] = {}
    _walk(root, "", origin, lines, ())
    return Document(_construct(root, origin), origin, lines)


def parse_value(text: str, origin: str) -> Any:
    """The value of one `key=value` override: a YAML scalar or flow, so that `[0, 1]`, `null` and `true`
    mean what they say.

    Raises:
        RecipeError: the text is not YAML.
    """
    root = _compose(text, origin)
    if root is None:
        raise RecipeError(origin, "no value", instead="write null after the equals sign to empty a key")
    _walk(root, "", origin, {}, ())
    return _construct(root, origin)


def _compose(text: str, origin: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise _syntax(error, origin) from None


def _construct(root: yaml.Node, origin: str) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date such as 2024-13-01
        raise _syntax(error, origin) from None
    finally:
        loader.dispose()


def _syntax(error: Exception, origin: str) -> RecipeError:
    mark = getattr(error, "problem_mark", None)
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    said = [str(p) for p in (getattr(error, "context", None), getattr(error, "problem", None)) if p]
    way = "quote values that hold ': ' or start with one of @ ` % & * ! { ["
    return RecipeError(f"{origin}{place}: YAML", ", ".join(said) or str(error), instead=way)


def _walk(node: yaml.Node, prefix: str, origin: str, lines: dict[str, str], above: tuple[int, ...]) -> None:
    """Note the line of every key; refuse keys written twice, keys not text, and structures in themselves."""
    if id(node) in above:
        raise RecipeError(
            f"{origin}, line {node.start_mark.line + 1}: '{prefix}'", "an alias to a part it is inside of"
        )
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, f"{prefix}[{index}]", origin, lines, above)
    if not isinstance(node, yaml.MappingNode):
        return
    own: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            _walk(value, prefix, origin, {}, above)
            continue
        if key.tag != "tag:yaml.org,2002:str":
            raise RecipeError(
                f"{origin}, line {line}: a key",
                f"{_shown(key)}, which YAML does not read as text",
                instead=f'put it in quotes: "{getattr(key, "value", "")}"',
            )
        dotted = f"{prefix}.{key.value}" if prefix else key.value
        if key.value in own:
            raise RecipeError(
                f"{origin}, line {line}: '{dotted}'",
                f"the same key on line {own[key.value]}",
                "YAML would silently keep the last one",
                "remove one of the two",
            )
        own[key.value] = line
        lines[dotted] = f"{origin}, line {line}"
        _walk(value, dotted, origin, lines, above)


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return f"'{node.value}'"
