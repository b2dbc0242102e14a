"""The recipe: one run, described once. `load_recipe` reads one; plan and train both build from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from skimp.recipe.activations import Activations
from skimp.recipe.adapter import Adapter
from skimp.recipe.attention import Attention
from skimp.recipe.check import contradictions
from skimp.recipe.data import Data
from skimp.recipe.derive import fill
from skimp.recipe.fields import Flag, Section, Words
from skimp.recipe.log import Log
from skimp.recipe.model import Model
from skimp.recipe.optimizer import Optimizer
from skimp.recipe.resources import Budget, Exact
from skimp.recipe.routine import Checkpoint, Eval, Sample
from skimp.recipe.survive import Survive
from skimp.recipe.train import Train

#: "CPU" and " cpu" are the same device.
Device = Annotated[Words, AfterValidator(lambda name: name.strip().lower())]


class Recipe(Section):
    """A whole run. Frozen; equal recipes describe equal runs; `as_dict` and `load_recipe` are inverses."""

    model: Model = Field(description="The model; a name alone is enough.")
    data: Data = Field(description="The text, from files to packed rows.")
    output: Words = Field(min_length=1, description="Folder of the run: checkpoints, metrics, report.")
    precision: Literal["fp32", "bf16-mixed", "bf16"] = Field(
        default="fp32",
        description="fp32; bf16-mixed computes in bfloat16 and keeps float32 weights; bf16 keeps bfloat16 "
        "weights and rounds "
        "updates stochastically.",
    )
    device: Device = Field(default="cpu", description="cpu, cuda, or a card to plan for: rtx-4090, 24GB, 8x80GB.")
    budget: Budget = Field(
        default_factory=Budget,
        description="Most memory the run may use, such as 2GB; null means all there is.",
    )
    train: Train = Field(default_factory=Train, description="The optimisation.")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The update rule; a name alone is enough.")
    adapter: Adapter | None = Field(
        default=None, description="Train an addition to the frozen model, such as lora; null trains the model itself."
    )
    activations: Activations = Field(
        default_factory=Activations, description="Approximations in what is kept for backward; none by default."
    )
    attention: Attention | None = Field(
        default=None,
        description="Another attention than the model's own, such as s2-attention; null keeps its own.",
    )
    eval: Eval | None = Field(default_factory=Eval, description="Held-out loss; null switches it off.")
    sample: Sample | None = Field(default=None, description="One text generated before training and one after.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When the run is saved.")
    log: Log = Field(
        default_factory=Log,
        description="Loggers that follow the run: tensorboard, trackio, wandb; none by default.",
    )
    report: Flag = Field(
        default=True,
        description="After the run, draw report.html and memory.png into its folder, in a process of their own.",
    )
    exact: Exact = Field(default_factory=Exact, description="Exact techniques to pin; all else is planned.")
    survive: Survive = Field(default_factory=Survive, description="What happens when memory runs short.")
    auto: Literal["exact", "approximate"] = Field(
        default="exact",
        description="Which techniques the planner may choose by itself: those that leave the mathematics "
        "alone, or also "
        "those that approximate it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, value: Any) -> Any:
        return fill(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _whole_recipe(self) -> Recipe:
        problems = contradictions(self)
        if problems:
            raise PydanticCustomError("skimp_problems", "keys that contradict each other", {"problems": problems})
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of seq_len tokens in one optimizer step."""
        return self.train.batch_tokens // self.data.seq_len

    def as_dict(self) -> dict[str, Any]:
        """Every key with its value, in plain JSON types; `load_recipe(recipe.as_dict()) == recipe`."""
        return self.model_dump(mode="json", by_alias=True)


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors and for the reference page of the docs."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
