"""`model.weights:` — the codec in which a frozen base is kept."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from skimp.core.errors import did_you_mean
from skimp.core.option import Option
from skimp.core.registry import facts, methods
from skimp.recipe.fields import Section, Words, or_text
from skimp.recipe.problem import Problem


class Weights(Section):
    """A codec of frozen weights. `weights: NAME` is short for `weights: {name: NAME}`. Further keys are the codec's
    own: `skimp methods NAME` lists them. What it decodes to, hence what is computed in, is the recipe's `precision`."""

    model_config = ConfigDict(**{**Section.model_config, "extra": "allow"})

    name: Words = Field(description="A codec of frozen weights: nf4, int8, int4 or sketch.")

    @model_validator(mode="before")
    @classmethod
    def _of_the_codec(cls, value: Any) -> Any:
        """A name alone; every key of the codec read or filled with its default, every other one refused."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or "name" not in value:
            return value
        known = options_of(value["name"])
        if known is None:
            names = weight_codecs()
            problem = Problem(
                "model.weights",
                "a codec of frozen weights",
                repr(value["name"]),
                "",
                (did_you_mean(value["name"], names),),
            )
            raise PydanticCustomError("skimp_problems", "a codec", {"problems": [problem]})
        filled: dict[str, Any] = {"name": value["name"]}
        found: list[Problem] = []
        for key, written in value.items():
            where = f"model.weights.{key}"
            if key == "name":
                continue
            if key not in known:
                takes = f"{filled['name']} takes {', '.join(known)}"
                found.append(Problem(where, "no such key", repr(written), takes, (did_you_mean(str(key), known),)))
                continue
            try:
                filled[key] = known[key].read(written)
            except ValueError:
                found.append(Problem(where, known[key].takes, repr(written), "", (known[key].about,)))
        filled |= {key: option.default for key, option in known.items() if key not in filled}
        if not found:
            found += _made(filled)
        if found:
            raise PydanticCustomError("skimp_problems", "keys of the codec", {"problems": found})
        return filled

    def options(self) -> dict[str, Any]:
        """The keys of this codec, each with its value."""
        return {key: getattr(self, key) for key in options_of(self.name) or {}}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))


def weight_codecs() -> list[str]:
    """Codecs that a recipe may keep a frozen base in."""
    return [name for name, known in methods().items() if known.kind == "codec" and known.recipe.startswith("model:")]


def options_of(name: Any) -> dict[str, Option] | None:
    """The keys of a codec; None where there is no such codec of weights."""
    if not isinstance(name, str) or name not in weight_codecs():
        return None
    return dict(facts(name, "codec").options)


def _made(filled: dict[str, Any]) -> list[Problem]:
    """What only several keys together, or a codec's own rule for one, can refuse."""
    block = filled.get("block", filled.get("group", 2))
    key = "block" if "block" in filled else "group"
    if key == "block" and block & (block - 1):
        return [Problem("model.weights.block", "a power of two from 32 to 4096", f"{block}", "", ("block: 64",))]
    if filled.get("bits", 4) == 3:
        return [Problem("model.weights.bits", "4 or 2", "3", "three do not fill a byte", ("bits: 4", "bits: 2"))]
    if key == "group" and block % 2:
        return [Problem("model.weights.group", "an even number", f"{block}", "", ("group: 64",))]
    return []
