"""`model:` — which model, and where its weights come from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from skimp.recipe.fields import Section, Whole, Words, or_text
from skimp.recipe.weights import Weights


class Model(Section):
    """The policy model of the run. `model: NAME` is short for `model: {name: NAME}`."""

    name: Words = Field(
        min_length=1,
        description="A preset (smollm2-135m), a Hub id (owner/name), a folder with config.json, a bare "
        "config.json, or a "
        ".gguf file.",
    )
    revision: Words | None = Field(
        default=None,
        description="Branch, tag or commit of a Hub id; null takes the main branch and records the commit it was.",
    )
    init: Literal["pretrained", "scratch"] = Field(
        default="pretrained",
        description="pretrained loads weights; scratch draws them at random from `seed`.",
    )
    positions: Literal["strict", "extend"] = Field(
        default="strict",
        description="strict refuses a data.seq_len beyond the model's positions; extend trains there "
        "knowingly (rotary "
        "models only).",
    )
    seed: Whole = Field(default=0, ge=0, description="Seed of randomly drawn weights.")
    weights: Weights | None = Field(
        default=None,
        description="Keep the linear layers below the head in this codec (nf4, int8, int4, sketch): frozen under an "
        "adapter, or int8 trained by optimizer=q-galore. null keeps them in the precision.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))
