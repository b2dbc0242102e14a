"""`log:` — other programs' loggers that follow the run; each writes in a process of its own."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from skimp.core.errors import did_you_mean
from skimp.recipe.fields import Section, Words, refuse

NAMES = ("tensorboard", "trackio", "wandb")


class TensorBoard(Section):
    """Event files for TensorBoard."""

    dir: Words | None = Field(
        default=None, min_length=1, description="Folder of the event files; null is `tensorboard` in the run's folder."
    )


class Trackio(Section):
    """A run in Trackio's local database, or in a Space of the Hub."""

    project: Words = Field(default="skimp", min_length=1, description="Trackio's project for the run.")
    name: Words | None = Field(
        default=None,
        description="Name of the run in Trackio, to which six characters are added; null is that of its folder.",
    )
    space: Words | None = Field(default=None, description="Space on the Hub to send to; null stays on this machine.")


class Wandb(Section):
    """A run of Weights & Biases."""

    project: Words = Field(default="skimp", min_length=1, description="Project of W&B for the run.")
    name: Words | None = Field(default=None, description="Name of the run in W&B; null is that of its folder.")
    entity: Words | None = Field(default=None, description="User or team; null is the one that is logged in.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline writes into the run's folder, for `wandb sync` later."
    )


class Log(Section):
    """Loggers. `log: NAME` and `log: [NAME, …]` switch them on as they are; a mapping gives options.

    metrics.jsonl is written in any case, and it is what the loggers read.
    """

    tensorboard: TensorBoard | None = Field(default=None, description="TensorBoard; false is off, {} or true is on.")
    trackio: Trackio | None = Field(default=None, description="Trackio; false is off, {} or true is on.")
    wandb: Wandb | None = Field(default=None, description="Weights & Biases; false is off, {} or true is on.")

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        """Names, lists and switches become sections; a name that is no logger's is refused with near ones."""
        return {name: _section(name, options) for name, options in opened(value).items()}

    @model_serializer(mode="plain")
    def _switches(self) -> dict[str, Any]:
        """Off is written `false`: an empty key in YAML reads as null, and would say neither."""
        parts = {name: getattr(self, name) for name in NAMES}
        return {name: False if part is None else part.model_dump(mode="json") for name, part in parts.items()}

    @property
    def wanted(self) -> dict[str, dict[str, Any]]:
        """The loggers that are on, with their options."""
        return {name: part.model_dump() for name in NAMES if (part := getattr(self, name)) is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = _as_written(handler)
        keep: dict[str, Any] = {key: section[key] for key in ("title", "description") if key in section}
        names = {"type": "string", "enum": list(NAMES)}
        return {**keep, "anyOf": [names, {"type": "array", "items": names}, section]}


def opened(value: Any) -> dict[str, Any]:
    """`log` as a mapping of names: from null, one name, a list of names and mappings, or a mapping.

    Raises:
        PydanticCustomError: an unknown name, or another shape.
    """
    if value is None or value is False:
        return {}
    if isinstance(value, Log):
        return value.model_dump()
    parts = value if isinstance(value, (list, tuple)) else [value]
    found: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, (str, dict)):
            raise refuse("names of loggers: tensorboard, trackio, wandb", "write log: [tensorboard]")
        found |= {part: {}} if isinstance(part, str) else part
    for name in found:
        if name not in NAMES:
            raise refuse(f"a logger; unknown is '{name}'", did_you_mean(str(name), NAMES))
    return found


def _section(name: str, options: Any) -> Any:
    if options is None:
        raise refuse(
            f"options of {name}, or a switch",
            f"{name}: {{}} switches it on as it is, {name}: false off",
            "an empty key in YAML says neither",
        )
    return {True: {}, False: None}[options] if isinstance(options, bool) else options


def _as_written(handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """The section by its fields. pydantic's own schema of a serialised model would only say 'object'."""
    fields = {}
    for name, kind in (("tensorboard", TensorBoard), ("trackio", Trackio), ("wandb", Wandb)):
        inside = handler.resolve_ref_schema(handler(kind.__pydantic_core_schema__))
        description = Log.model_fields[name].description
        fields[name] = {"anyOf": [inside, {"type": "boolean"}], "default": False, "description": description}
    return {
        "type": "object",
        "title": "Log",
        "description": inspect.cleandoc(Log.__doc__ or ""),
        "properties": fields,
        "additionalProperties": False,
    }
