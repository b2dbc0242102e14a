"""`optimizer:` — the update rule and its constants. The learning rate and weight decay are in `train:`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from skimp.recipe.fields import Number, Section, Words
from skimp.recipe.model import or_text

Beta = Annotated[Number, Field(ge=0, lt=1)]


class Optimizer(Section):
    """The update rule. `optimizer: NAME` is short for `optimizer: {name: NAME}`."""

    name: Words = Field(default="adamw", description="An update rule of `skimp methods`, such as adamw or adamw8bit.")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.999), description="Decay of the first and of the second moment, each per step."
    )
    eps: Number = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))
