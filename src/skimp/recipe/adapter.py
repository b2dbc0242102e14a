"""`adapter:` — train a small addition to a frozen base instead of the base itself."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.registry import Facts, facts
from skimp.recipe.fields import Flag, Number, Section, Whole, Words, or_text, refuse
from skimp.recipe.problem import Problem

ALL_LINEAR = "all-linear"
#: What is taken where a recipe says nothing and continues no adapter. Every linear layer rather than query and value
#: alone (which underfits), and 2 r as alpha: the usual choices of today's trainers.
DEFAULTS: dict[str, Any] = {"r": 16, "scale": "standard", "targets": ALL_LINEAR, "init": "kaiming"}


def _targets(value: Any) -> Any:
    """all-linear, a list of module names, or one regular expression over full module names."""
    expected = "all-linear, a list of module names, or a regular expression over full module names"
    if value is None:
        return None
    if isinstance(value, str):
        if value != ALL_LINEAR:
            try:
                re.compile(value)
            except re.error as error:
                raise refuse(expected, "write [q_proj, v_proj]", f"as an expression it is wrong: {error}") from None
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) and v for v in value):
        raise refuse(expected, "write [q_proj, v_proj]")
    if len(set(value)) < len(value):
        raise refuse("each target once", f"write {sorted(set(value))}")
    return tuple(value)


Targets = Annotated[
    str | tuple[str, ...] | None,
    BeforeValidator(_targets),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]


class Adapter(Section):
    """A small addition to a frozen base. `adapter: lora` is short for its defaults. Each method takes some of the keys
    below and keys of its own: `skimp methods NAME` lists them."""

    model_config = ConfigDict(**{**Section.model_config, "extra": "allow"})

    name: Words = Field(default="lora", description="An adapter of `skimp methods`.")
    r: Whole | None = Field(default=None, ge=1, description="Rank of every addition; 16 unless `from` says it.")
    alpha: Number | None = Field(default=None, gt=0, description="Numerator of the scale; 2 r unless `from` says it.")
    scale: Literal["standard", "rslora"] | None = Field(
        default=None,
        description="Factor of the addition: standard is alpha / r, rslora alpha / sqrt(r), which keeps updates of the "
        "same size at large ranks. standard unless `from` says it.",
    )
    targets: Targets = Field(
        default=None,
        description="Which linear layers: all-linear (all but the head), a list such as [q_proj, v_proj], or a regular "
        "expression over full module names. all-linear unless `from` says it.",
    )
    dropout: Number = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the addition's inputs that are set to 0 in training; each mask is a function of seed, "
        "module, step, row and position.",
    )
    embeddings: Flag = Field(
        default=False, description="Train the token embedding in full beside the adapter; its bytes are in the table."
    )
    head: Flag = Field(
        default=False,
        description="Train the output head in full beside the adapter; tied to the embedding, both are one matrix.",
    )
    init: Literal["kaiming", "gaussian", "olora", "pissa", "pissa-fast"] | None = Field(
        default=None,
        description="How A begins: kaiming is uniform within 1 / sqrt(inputs), gaussian has deviation 1 / r. B begins "
        "at 0, so that step 0 is the base. kaiming unless `from` says it.",
    )
    source: Words | None = Field(
        default=None, alias="from", description="Continue this adapter: a folder in the format of Hugging Face PEFT."
    )

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        """A name alone; keys the method does not take refused, its own read; defaults where nothing is continued."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        method = facts_of(value.get("name", "lora"))
        if method is None:
            return value  # said elsewhere
        value = read_keys(value, method, {f.alias or k: f.default for k, f in cls.model_fields.items() if k != "name"})
        if value.get("from") is not None:
            return value
        defaults = {k: d for k, d in DEFAULTS.items() if k in method.shared}
        filled = {**value, **{k: d for k, d in defaults.items() if value.get(k) is None}}
        if value.get("alpha") is None and "alpha" in method.shared:
            rank = filled["r"]
            filled["alpha"] = 2 * rank if isinstance(rank, (int, float)) and not isinstance(rank, bool) else 2.0
        return filled

    @model_validator(mode="after")
    def _one_origin(self) -> Adapter:
        if self.source is None:
            return self
        given = [key for key in ("r", "alpha", "scale", "targets", "init") if getattr(self, key) is not None]
        if given:
            raise PydanticCustomError(
                "skimp",
                "{expected}",
                {
                    "expected": f"either `from` or {', '.join(given)}",
                    "why": "the adapter in that folder has them already, and the written ones would be ignored",
                    "instead": f"leave out {', '.join(given)}",
                },
            )
        return self

    def asked(self) -> dict[str, Any]:
        """Every key the method takes, with its value, and its name."""
        method = facts(self.name, "adapter")
        keys = dict.fromkeys((*(key for key in method.shared if key != "from"), *method.options))
        return {"name": self.name, **{key: getattr(self, key) for key in keys}}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))


def facts_of(name: Any) -> Facts | None:
    """What is known of an adapter; None where there is none of that name, which is said elsewhere."""
    try:
        return facts(name, "adapter")
    except (SkimpError, TypeError):
        return None


def read_keys(value: dict[Any, Any], method: Facts, shared: dict[str, Any], section: str = "adapter") -> dict[str, Any]:
    """The written keys, the method's own among them read or filled with their defaults.

    `shared`: the keys of all adapters, each with what it is where nothing is meant; that much may always be written."""
    takes = dict.fromkeys((*method.shared, *method.options))
    read: dict[str, Any] = {"name": method.name}
    found: list[Problem] = []
    for key, written in value.items():
        if key == "name" or (written is None and key in shared):
            continue
        if key not in takes and key in shared and written == shared[key]:
            continue
        if key not in takes:
            near = did_you_mean(str(key), takes) if takes else "leave it out"
            why = f"{method.name} takes {', '.join(takes) or 'no keys'}"
            found.append(Problem(f"{section}.{key}", "no such key", repr(written), why, (near,)))
        elif key not in method.options:
            read[key] = written
        else:
            try:
                read[key] = method.options[key].read(written)
            except ValueError:
                option = method.options[key]
                found.append(Problem(f"{section}.{key}", option.takes, repr(written), "", (option.about,)))
    if found:
        raise PydanticCustomError("skimp_problems", f"keys of the {section}", {"problems": found})
    continued = read.get("from") is not None
    own = {k: o.default for k, o in method.options.items() if k not in read and not (continued and k in shared)}
    return {**read, **own}
