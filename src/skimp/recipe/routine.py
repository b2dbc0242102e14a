"""`eval:`, `sample:`, `checkpoint:` — what happens beside training; it never changes the trained numbers."""

from __future__ import annotations

from pydantic import Field

from skimp.recipe.fields import Flag, Number, Section, Whole, Words


class EarlyStop(Section):
    """Stop when the held-out loss no longer falls."""

    patience: Whole = Field(
        default=3, ge=1, description="Evaluations in a row without improvement before the run stops."
    )
    min_delta: Number = Field(
        default=0.0, ge=0, description="Smallest fall of the held-out loss that counts as improvement."
    )


class Eval(Section):
    """Held-out loss, in flat memory. `eval: null` switches it off."""

    at_start: Flag = Field(default=True, description="Evaluate before the first step.")
    at_end: Flag = Field(default=True, description="Evaluate after the last step.")
    every: Whole | None = Field(default=None, ge=1, description="Evaluate every so many steps; null does not.")
    tokens: Whole = Field(default=4096, ge=1, description="Held-out tokens scored by one evaluation, at most.")
    watch: Words | None = Field(
        default=None,
        min_length=1,
        description="The validation set whose loss decides the best state and the early stop; null: the first.",
    )
    keep_best: Flag = Field(
        default=False, description="Keep the checkpoint with the lowest held-out loss; needs `every`."
    )
    early_stop: EarlyStop | None = Field(default=None, description="Stop when the loss no longer falls; needs `every`.")


class Sample(Section):
    """One generated text before training and one after."""

    prompt: Words = Field(min_length=1, description="The text to go on from.")
    tokens: Whole = Field(default=40, ge=1, description="Tokens to generate.")


class Checkpoint(Section):
    """When the whole state of the run is saved."""

    every: Whole | None = Field(default=None, ge=1, description="Save every so many steps; null does not.")
    keep: Whole = Field(
        default=2,
        ge=1,
        description="Complete checkpoints kept, the newest first; the best is kept beside them.",
    )
    at_end: Flag = Field(default=True, description="Save after the last step.")
