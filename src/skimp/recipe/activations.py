"""`activations:` — approximations in what is kept for backward. Exact ways to keep less are in `exact:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from skimp.recipe.fields import Number, Section, Whole, refuse


class Derivative(Section):
    """Activations, gated products and frozen norms keep codes for backward. `derivative: 4` is short for its
    defaults."""

    bits: Whole = Field(default=4, description="Bits of a code: 4.")
    grid: Literal["lloyd", "uniform"] = Field(
        default="lloyd",
        description="Values of a derivative's codes: lloyd, of least error for normal inputs, 0 and 1 exact; or equal "
        "steps.",
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest",
        description="nearest; stochastic draws one of the two values beside a derivative, so that the mean is exact.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        """A number alone is the bits."""
        value = value if isinstance(value, dict) else {"bits": value}
        bits = value.get("bits", 4)
        if bits is not None and str(bits) not in ("4", "4.0"):
            raise refuse("4", "activations: {derivative: 4}, or null: everything kept as it is", f"not {bits!r}")
        return value


class Points(Section):
    """Queries, keys and values keep a few tokens of their input, and an index and a factor for every token.
    `pamm: 512` is short for one token of 512."""

    one_of: Whole = Field(
        ge=1, description="A token is kept for so many tokens of a micro-batch; the paper: 128 to 512."
    )
    eps: Number | None = Field(
        default=None,
        gt=0,
        description="Tokens further than so many of their lengths from the nearest kept direction are left out, and "
        "the others count more; null keeps all, as the paper does.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sugar(cls, value: Any) -> Any:
        """A number alone is how many tokens one is kept for."""
        return value if isinstance(value, dict) else {"one_of": value}


class Activations(Section):
    """What is kept for backward in another form than it was made. The forward stays exact, gradients do not."""

    derivative: Derivative | None = Field(
        default=None,
        description="4: activations keep their derivative in 4 bits, gated products and frozen norms their parts; null "
        "keeps them whole.",
    )
    pamm: Points | None = Field(
        default=None,
        description="512: queries, keys and values keep one of 512 tokens of their input, and for every token which "
        "one it is most like; null keeps the input.",
    )
    kept_bits: Literal[8, 4] | None = Field(
        default=None,
        description="What blocks keep for backward is rounded to so many bits a number: 8, or 4 but for attention's "
        "tensors, which keep 8; null keeps them as they are.",
    )
