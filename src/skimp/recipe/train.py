"""`train:` — how long, how large a step, along which schedule. All of it is mathematics of the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from skimp.recipe.fields import Number, Section, Whole, number, refuse
from skimp.recipe.layers import Layers
from skimp.recipe.restart import Restart


def _warmup(value: Any) -> Any:
    """Steps as an int, or a fraction of the run as a float below 1."""
    amount = number(value)
    if amount is None or amount < 0 or (amount >= 1 and not amount.is_integer()):
        raise refuse(
            "a whole number of steps, or a fraction of the run below 1",
            "write warmup: 100, or 0.05 for a twentieth",
        )
    return int(amount) if amount >= 1 or amount == 0 else amount


class Loss(Section):
    """Terms of the language-model loss beside plain cross-entropy."""

    label_smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Probability mass spread evenly over the vocabulary."
    )
    z_loss: Number = Field(default=0.0, ge=0, description="Weight of the squared log of the softmax's normaliser.")


class Spike(Section):
    """When a loss far above its recent level stops the run. A NaN or infinite loss always stops it."""

    factor: Number | None = Field(
        default=None,
        gt=1,
        description="Stop when the loss exceeds this many times the median of the window; null never does.",
    )
    window: Whole = Field(
        default=20, ge=2, description="Steps in the window, which must be full before the test begins."
    )


class Train(Section):
    """The optimisation. Give `steps` or `epochs`, not both; neither means one epoch."""

    steps: Whole | None = Field(default=None, ge=1, description="Optimizer steps.")
    epochs: Number | None = Field(
        default=None, gt=0, description="Passes over the training rows; 1 when steps is not given either."
    )
    batch_tokens: Whole = Field(
        default=2048,
        ge=1,
        description="Tokens of one optimizer step, a multiple of data.seq_len; four rows when not given. The "
        "micro-batch is another thing: the planner chooses it.",
    )
    lr: Number = Field(default=2e-5, gt=0, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Learning rate after warm-up; wsd is level, then falls over the last `decay`.",
    )
    warmup: Annotated[int | float, BeforeValidator(_warmup), WithJsonSchema({"type": "number", "minimum": 0})] = Field(
        default=0.05, description="Warm-up: whole steps, or a fraction of the run when below 1."
    )
    min_lr: Number = Field(default=0.0, ge=0, le=1, description="Learning rate at the end, as a ratio of lr.")
    decay: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="wsd only: fraction of the run over which the rate falls; 0.2 when not given.",
    )
    clip: Number | None = Field(
        default=1.0,
        gt=0,
        description="Largest global gradient norm; null switches clipping off, and says so in the table.",
    )
    weight_decay: Number = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay of matrices; norms and biases are never decayed.",
    )
    seed: Whole = Field(
        default=0, ge=0, description="Seed of everything random in training beside data order and weights."
    )
    layers: Layers | None = Field(
        default=None, description="Train a few blocks at a time: lisa, owlore or badam; null trains all of them."
    )
    restart: Restart | None = Field(
        default=None, description="Moments that begin anew every so many steps, with a warm-up after; null: never."
    )
    loss: Loss = Field(default_factory=Loss, description="Terms of the loss.")
    spike: Spike = Field(default_factory=Spike, description="When a jump of the loss stops the run.")
