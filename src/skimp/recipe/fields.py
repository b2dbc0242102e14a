"""The value types of a recipe: what a person may write for a number, a whole number, a size.

PyYAML reads `2e-5` (no dot in the mantissa) as the *text* '2e-5', so every number also takes its own
spelling as text. Booleans are never numbers here, although Python says they are: `steps: yes` is a slip,
not one step.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema
from pydantic_core import PydanticCustomError

from skimp.core.errors import SkimpError
from skimp.core.units import parse_bytes


class Section(BaseModel):
    """A part of a recipe: frozen, unknown keys refused, every default checked like a written value."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def refuse(expected: str, instead: str = "", why: str = "") -> PydanticCustomError:
    """An error of one field: what it takes, why, and the nearest thing that works. `explain` prints it."""
    return PydanticCustomError("skimp", "{expected}", {"expected": expected, "instead": instead, "why": why})


def number(value: Any) -> Any:
    """A finite float from a number or its spelling ('2e-5'); None passes, for keys that may be null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refuse("a number", "write it as 0.1, 3 or 2e-5")
    try:
        result = float(value)
    except ValueError:
        raise refuse("a number", "write it as 0.1, 3 or 2e-5") from None
    if not math.isfinite(result):
        raise refuse("a finite number", "leave the key out, or write null where nothing is meant")
    return result


def whole(value: Any) -> Any:
    """An int from 2048, 2_048, 2048.0 or '2e3'; None passes, for keys that may be null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise refuse("a whole number", "write it in digits, such as 2048")
    if isinstance(value, int):
        return value
    try:
        result = float(value)
    except ValueError:
        raise refuse("a whole number", "write it in digits, such as 2048") from None
    if not result.is_integer():  # False for infinities and NaN too
        raise refuse("a whole number", "write it in digits, such as 2048")
    return int(result)


def flag(value: Any) -> Any:
    """true or false, and nothing that merely resembles it; None passes, for keys that may be null."""
    if value is not None and not isinstance(value, bool):
        raise refuse("true or false")
    return value


def words(value: Any) -> Any:
    """Text; YAML turns unquoted 2024, yes and 2024-01-01 into other types, so the way out is quotes."""
    if value is None or isinstance(value, str):
        return value
    raise refuse("text", f'put it in quotes: "{value}"' if not isinstance(value, (dict, list)) else "")


def size(value: Any) -> Any:
    """Bytes from '2GB', '1.5GiB' or an int; None passes, for keys that may be null."""
    if value is None:
        return None
    try:
        return parse_bytes(value, key="")
    except SkimpError as error:
        way = " or ".join(error.instead)
        raise refuse("a size in bytes", way, error.why) from None
    except (TypeError, ValueError, OverflowError):
        raise refuse("a size in bytes", "write it as 2GB, 1.5GiB or 512MB") from None


Number = Annotated[float, BeforeValidator(number)]
Whole = Annotated[int, BeforeValidator(whole)]
Flag = Annotated[bool, BeforeValidator(flag)]
Words = Annotated[str, BeforeValidator(words)]
Size = Annotated[int, BeforeValidator(size), WithJsonSchema({"type": ["string", "integer"]})]


def or_text(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a section that may also be written as one word."""
    keep: dict[str, Any] = {key: schema[key] for key in ("title", "description") if key in schema}
    return {**keep, "anyOf": [{"type": "string"}, schema]}
