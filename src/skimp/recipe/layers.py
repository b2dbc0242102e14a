"""`train.layers:` — train a few blocks at a time: which ones, for how long, and what becomes of their moments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from skimp.recipe.fields import Flag, Number, Section, Whole, Words, or_text

#: What a way is published with, where a recipe says nothing: LISA's trainer and OwLore's scripts; BAdam freezes what
#: lies outside the blocks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "lisa": {"active": 2, "every": 20, "embeddings": True, "head": True},
    "owlore": {"active": 5, "every": 50, "embeddings": True, "head": True, "threshold": 13.0},
    "badam": {"active": 1, "every": 100, "embeddings": False, "head": False, "order": "random"},
}


class Layers(Section):
    """Blocks that train in turn. `layers: lisa` is short for its defaults."""

    name: Words = Field(
        default="lisa",
        description="lisa draws blocks evenly, owlore those with many outliers more often, badam each once a round.",
    )
    active: Whole = Field(
        default=2, ge=1, description="Blocks that train at a time: 2 for lisa, 5 for owlore, 1 for badam."
    )
    every: Whole = Field(
        default=20,
        ge=1,
        description="Optimizer steps until others are drawn: 20 for lisa, 50 for owlore, 100 for badam.",
    )
    on_switch: Literal["drop", "keep"] = Field(
        default="drop",
        description="Moments of a block that leaves: drop gives their memory back and they begin anew; keep holds "
        "those of all blocks from the start, which saves gradients only.",
    )
    warmup: Whole = Field(
        default=0, ge=0, description="Steps over which the learning rate of a block that enters rises to the full one."
    )
    embeddings: Flag = Field(
        default=True, description="Train the embeddings always; false: never, and backward ends at the lowest block."
    )
    head: Flag = Field(default=True, description="Train the output head and the final norm always; false: never.")
    order: Literal["random", "ascending", "descending"] | None = Field(
        default=None, description="badam only: the order of a round; random when not given."
    )
    threshold: Number | None = Field(
        default=None, gt=1, description="owlore only: multiples of the mean from which an entry is an outlier; 13."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        """A name alone; and the way's own defaults."""
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        own = DEFAULTS.get(value.get("name", "lisa"), {})
        return {**value, **{key: default for key, default in own.items() if value.get(key) is None}}

    @model_validator(mode="after")
    def _own_keys(self) -> Layers:
        for key, owner in (("order", "badam"), ("threshold", "owlore")):
            if getattr(self, key) is not None and self.name != owner:
                raise PydanticCustomError(
                    "skimp",
                    "{expected}",
                    {
                        "expected": f"no `{key}` with {self.name}",
                        "why": f"it is {owner}'s, and would be ignored",
                        "instead": f"leave out {key}, or name: {owner}",
                    },
                )
        if self.warmup >= self.every:
            raise PydanticCustomError(
                "skimp",
                "{expected}",
                {
                    "expected": f"warmup below every ({self.every})",
                    "why": f"a block that enters would never reach its learning rate in {self.warmup} steps",
                    "instead": f"warmup: {self.every // 2}",
                },
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return or_text(handler.resolve_ref_schema(handler(schema)))
