"""What trained codebooks need of the rest of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skimp.recipe.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skimp.recipe.schema import Recipe


def codebooks(recipe: Recipe) -> Iterator[Problem]:
    """A sketched base beneath them."""
    if recipe.model.weights is None and recipe.adapter is not None and recipe.adapter.name == "sketchtune":
        yield Problem(
            "model.weights",
            "sketch, with adapter sketchtune",
            "null",
            "what trains are the values of learned codebooks, and a dense weight has none",
            (
                "model.weights=sketch: 4 bits a weight and 16 values a row, for 32",
                "adapter=lora: it goes on a dense base",
            ),
        )


def calibration(recipe: Recipe) -> Iterator[Problem]:
    """Weights that can be read once more, where their codes are learned from text."""
    rows = 0 if recipe.adapter is None else getattr(recipe.adapter, "calibrate", 0) or 0
    if rows and recipe.model.init == "scratch":
        yield Problem(
            "adapter.calibrate",
            "0, with model.init scratch",
            f"{rows}",
            "weights are read once more when their codes are learned, and those drawn at random lie nowhere",
            ("adapter.calibrate=0: codebooks by plain k-means", "model.init=pretrained"),
        )
