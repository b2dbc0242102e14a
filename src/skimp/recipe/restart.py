"""`train.restart:` — moments that begin anew every so many steps, and products of two factors that are balanced."""

from __future__ import annotations

from typing import Any

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from skimp.recipe.fields import Flag, Section, Whole, refuse


class Restart(Section):
    """Momentum reset, and weight refactorization. `restart: 200` is short for every 200 steps."""

    every: Whole = Field(default=200, ge=1, description="Optimizer steps between two restarts; none at the first step.")
    warmup: Whole = Field(
        default=0, ge=0, description="Steps over which the learning rate rises again after a restart, below `every`."
    )
    until: Whole | None = Field(default=None, ge=1, description="No restart from this step on; null: to the end.")
    refactor: Flag = Field(
        default=False,
        description="Before the reset each pair B, A of an adapter becomes the balanced factors of its own product; "
        "only moments of pairs that changed are reset.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """A number of steps alone."""
        return {"every": value} if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _rises(self) -> Restart:
        if self.warmup >= self.every:
            raise refuse(
                f"warmup below every ({self.every})",
                f"warmup: {self.every // 2}",
                f"in {self.warmup} steps the rate would never be full again",
            )
        if self.until is not None and self.until <= self.every:
            raise refuse(
                f"until above every ({self.every})",
                "until: null",
                f"with until {self.until} nothing would ever restart",
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        full = handler.resolve_ref_schema(handler(schema))
        keep: dict[str, Any] = {key: full[key] for key in ("title", "description") if key in full}
        return {**keep, "anyOf": [{"type": ["integer", "string"]}, full]}
