"""`attention:` — which keys a query sees, where it is not all before it: part of the model's mathematics."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from skimp.core.errors import SkimpError
from skimp.core.registry import Facts, facts
from skimp.recipe.adapter import read_keys
from skimp.recipe.fields import Section, Words, or_text


class Attention(Section):
    """Another attention than the model's own. `attention: NAME` is short for its defaults. Further keys are the
    method's own: `skimp methods NAME` lists them."""

    model_config = ConfigDict(**{**Section.model_config, "extra": "allow"})

    name: Words = Field(default="s2-attention", description="An attention of `skimp methods`.")

    @model_validator(mode="before")
    @classmethod
    def _of_the_method(cls, value: Any) -> Any:
        """A name alone; every key of the method read or filled with its default, every other one refused."""
        value = {"name": value} if isinstance(value, str) else value
        method = known(value.get("name", "s2-attention")) if isinstance(value, dict) else None
        return value if method is None else read_keys(value, method, {}, "attention")

    def options(self) -> dict[str, Any]:
        """The keys of the method, each with its value."""
        return {key: getattr(self, key) for key in facts(self.name, "attention").options}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))


def known(name: Any) -> Facts | None:
    """The facts of an attention; None where there is none of that name, which is said elsewhere."""
    try:
        return facts(name, "attention")
    except (SkimpError, TypeError):
        return None
