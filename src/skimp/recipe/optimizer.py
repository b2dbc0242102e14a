"""`optimizer:` — the update rule and its constants. The learning rate and weight decay are in `train:`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from skimp.core.errors import SkimpError, did_you_mean
from skimp.core.option import Option
from skimp.core.registry import facts
from skimp.recipe.fields import Number, Section, Words, or_text
from skimp.recipe.problem import Problem


class Optimizer(Section):
    """The update rule. `optimizer: NAME` is short for `optimizer: {name: NAME}`. Further keys are the rule's own:
    `skimp methods NAME` lists them."""

    model_config = ConfigDict(**{**Section.model_config, "extra": "allow"})

    name: Words = Field(default="adamw", description="An update rule of `skimp methods`, such as adamw or adamw8bit.")
    betas: tuple[Number, ...] | None = Field(
        default=None,
        description="Decay of the moments, each per step; [0.9, 0.999] for most rules; some have none.",
    )
    eps: Number | None = Field(default=None, description="Added to the root of the second moment; 1e-8 for most rules.")

    @model_validator(mode="before")
    @classmethod
    def _of_the_rule(cls, value: Any) -> Any:
        """A name alone; every key of the rule read or filled with its default, every other one refused."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        known = options_of(value.get("name", "adamw"))
        if known is None:
            return value
        filled: dict[str, Any] = {"name": value.get("name", "adamw")}
        found: list[Problem] = []
        for key, written in value.items():
            if key == "name" or (written is None and key in ("betas", "eps")):
                continue
            if key not in known:
                near = did_you_mean(str(key), known) if known else "leave it out"
                takes = f"{filled['name']} takes {', '.join(known) or 'no keys'}"
                found.append(Problem(f"optimizer.{key}", "no such key", repr(written), takes, (near,)))
                continue
            try:
                filled[key] = known[key].read(written)
            except ValueError:
                found.append(_wrong(key, known[key], written))
        if found:
            raise PydanticCustomError("skimp_problems", "keys of the update rule", {"problems": found})
        return filled | {key: option.default for key, option in known.items() if key not in filled}

    def options(self) -> dict[str, Any]:
        """The keys of this rule, each with its value."""
        return {key: getattr(self, key) for key in options_of(self.name) or {}}

    def renamed(self, name: str) -> Optimizer:
        """Another rule, with those of these keys that it takes too (two betas are not three)."""
        known = options_of(name) or {}
        kept = {key: value for key, value in self.options().items() if key in known and known[key].takes_it(value)}
        return Optimizer.model_validate({"name": name, **kept})

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))


def options_of(name: Any) -> dict[str, Option] | None:
    """The keys of an update rule; None where there is no such rule, which is said elsewhere."""
    try:
        return dict(facts(name, "update rule").options)
    except (SkimpError, TypeError):
        return None


def _wrong(key: str, option: Option, written: Any) -> Problem:
    """Of a list the place of the wrong number, when it is one number."""
    if option.sort == "numbers" and isinstance(written, (list, tuple)) and isinstance(option.default, tuple):
        one = Option(0.0, "", option.least, option.most, option.above, option.below)
        if len(written) == len(option.default):
            for i, number in enumerate(written):
                try:
                    one.read(number)
                except ValueError:
                    return Problem(f"optimizer.{key}[{i}]", one.takes, repr(number), "", (option.about,))
    return Problem(f"optimizer.{key}", option.takes, repr(written), "", (option.about,))
