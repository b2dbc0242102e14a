"""From pydantic's errors to a person's: full key, what was found, what is allowed, the nearest name."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from skimp.core.errors import did_you_mean
from skimp.recipe.problem import Problem

#: Keys of other trainers that are refused by name, with the reason; asked for so often that "unknown key"
#: is too curt.
REFUSED = {
    "trust_remote_code": (
        "code from a model repository would run on this machine, and its memory could not be planned",
        "a model of a family skimp knows, or convert the checkpoint to one",
    ),
    "gradient_accumulation_steps": (
        "the effective batch is train.batch_tokens; how often it is accumulated is the planner's choice",
        "train.batch_tokens, and exact.micro_batch to pin the rows of one forward",
    ),
    "gradient_checkpointing": ("recompute is the planner's choice", "exact.recompute: all"),
}

_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
    "tuple_type": "a list",
    "list_type": "a list",
    "string_too_short": "text that is not empty",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def problems(error: ValidationError, root: type[BaseModel], lines: Mapping[str, str]) -> list[Problem]:
    """All problems in `error`, each with its place from `lines` (dotted key -> "file, line n")."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "skimp_problems":
            found += detail["ctx"]["problems"]
        else:
            found.append(_problem(dict(detail), root))
    order = {key: n for n, key in enumerate(lines)}
    placed = [_placed(p, lines) for p in found]
    return sorted(placed, key=lambda p: order.get(_written(p.key, lines), len(order)))


def _written(key: str, lines: Mapping[str, str]) -> str:
    """The key itself where it has a line of its own, else the nearest section above it that has one."""
    while key and key not in lines:
        key = key.rpartition("[")[0] if key.endswith("]") else key.rpartition(".")[0]
    return key


def _placed(problem: Problem, lines: Mapping[str, str]) -> Problem:
    """With its place; `budget: 2 gigs` is reported as budget, not as the place it was meant for."""
    above = _written(problem.key, lines)
    key = above if above == "budget" and problem.key in ("budget.host", "budget.device") else problem.key
    return replace(problem, key=key, line=lines.get(above, problem.line))


def _problem(detail: dict[str, Any], root: type[BaseModel]) -> Problem:
    loc = detail["loc"]
    key, section, field = _follow(loc, root)
    kind, ctx, value = detail["type"], detail.get("ctx", {}), detail["input"]
    name = str(loc[-1]) if loc else ""
    if kind == "extra_forbidden":
        if name in REFUSED:
            why, way = REFUSED[name]
            return Problem(key, "not accepted", shown(value), why, (way,))
        return Problem(key, "no such key", shown(value), "", (_elsewhere(name, section, root),))
    if kind == "missing":
        return Problem(key, "needed, and has no default", "nothing", "", (_help(field),))
    if kind == "literal_error":
        choices = [str(c) for c in _choices(field.annotation)] if field else []
        near = did_you_mean(value, choices) if isinstance(value, str) else ""
        near = near if near.startswith("did") else ""
        return Problem(key, f"one of {', '.join(choices)}", shown(value), "", (near,))
    if kind == "skimp":
        return Problem(key, str(ctx["expected"]), shown(value), str(ctx["why"]), (str(ctx["instead"]),))
    if kind in _BOUNDS:
        name, word = _BOUNDS[kind]
        return Problem(key, f"a number {word} {ctx[name]:g}", shown(value), "", (_help(field),))
    if kind == "too_short" or kind == "too_long":
        return Problem(key, "a list of another length", shown(value), "", (_help(field),))
    expected = _TYPES.get(kind, detail["msg"])
    if expected == _TYPES["model_type"]:
        names = ", ".join(fields_of(section)) if section else ""
        return Problem(key, expected, shown(value), "", (f"its keys are {names}; leave it out for the defaults",))
    return Problem(key, expected, shown(value), "", (_help(field),))


def _follow(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None, Any]:
    """The dotted key of a pydantic location, the section it is in (or is), and its field."""
    key, section, field = "", root, None
    inside: type[BaseModel] | None = section
    for part in loc:
        if inside is not None and part in fields_of(inside):
            section, field = inside, fields_of(inside)[part]
            inside = _section_of(field.annotation)
            key = f"{key}.{part}" if key else str(part)
        elif isinstance(part, int):
            key = f"{key}[{part}]"
        elif inside is not None and part == inside.__name__:
            continue  # which kind of an entry that may be of several
        else:  # an unknown key of `inside`
            key = f"{key}.{part}" if key else str(part)
            field = None
    return key, inside or section, field


def fields_of(section: type[BaseModel]) -> dict[Any, Any]:
    """The fields of a section under the keys a person writes (`from` is a word of Python's)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _section_of(part)
        if found is not None:
            return found
    return None


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(c for part in get_args(annotation) for c in _choices(part))
    return ()


def _elsewhere(name: str, section: type[BaseModel] | None, root: type[BaseModel]) -> str:
    """The nearest key: in the same section, else the same name in another section, else the list."""
    near = did_you_mean(name, fields_of(section) if section else ())
    if near.startswith("did"):
        return near
    homes = [k for k in _all_keys(root) if k.rsplit(".", 1)[-1] == name]
    return f"did you mean {' or '.join(repr(h) for h in homes)}?" if homes else near


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in fields_of(section).items():
        keys.append(prefix + name)
        below = _section_of(field.annotation)
        if below is not None:
            keys += _all_keys(below, f"{prefix}{name}.")
    return keys


def _help(field: Any) -> str:
    return f"what the key is: {field.description}" if field is not None and field.description else ""


def shown(value: Any) -> str:
    """A value as a person would name it, short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    if isinstance(value, Mapping):
        return "a mapping with " + ", ".join(str(k) for k in list(value)[:8]) if value else "an empty mapping"
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
