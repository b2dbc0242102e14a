"""A sketched base learned from the run's own text when it is loaded: `adapter.calibrate` of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.sketch_calibrate import calibrate, peak_bytes
from skimp.adapters.targets import match
from skimp.core.batch import Batch
from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.errors import DataError
from skimp.core.structure import Structure, read_structure
from skimp.run.coded_base import stored_shape
from skimp.run.stored import names_for, open_stored


def rows_asked(recipe: Any) -> int:
    """Rows of text that the base is learned from; 0 without."""
    return 0 if recipe.adapter is None else int(getattr(recipe.adapter, "calibrate", 0) or 0)


def calibrated(
    recipe: Any, source: Any, text: Any, fill: Callable[[nn.Module], None], say: Callable[[str], None]
) -> Callable[[nn.Module], None]:
    """`fill`, and then the sketches learned anew where the recipe asks for it; `fill` itself where it does not.

    Args:
        source: the model, its weights here: each is read once more. text: what `prepare_text` gave. say: told how much
            was gained.
    """
    rows, asked = rows_asked(recipe), recipe.adapter
    if not rows:
        return fill

    def begin(model: nn.Module) -> None:
        fill(model)
        structure = read_structure(model)
        layers = dict(coded_layers(model))
        stored = open_stored(source.weights, model.config)
        try:
            written = names_for(stored, {f"{name}.weight": None for name in layers})

            def original(name: str) -> Tensor:
                dense = torch.empty(stored_shape(layers[name]), dtype=layers[name].dtype)
                stored.read_into(written[f"{name}.weight"], dense)
                return dense.t().contiguous() if layers[name].stored_transposed else dense

            found = calibrate(
                model,
                structure,
                match(model, structure, asked.targets),
                first_rows(text, recipe, rows),
                original,
                power=asked.power,
                damping=asked.damping,
                autocast=recipe.precision == "bf16-mixed",
            )
        finally:
            stored.close()
        if not found:
            return  # said by name after the first step
        before, after = (sum(getattr(one, key) for one in found) / len(found) for key in ("plain", "learned"))
        worst = max(found, key=lambda one: one.learned)
        say(
            f"sketches of {len(found)} layers learned from {rows} rows: mean square error of outputs {after:.2%}, "
            f"plain {before:.2%}; most in {worst.layer}, {worst.learned:.2%}"
        )

    return begin


def first_rows(text: Any, recipe: Any, rows: int) -> list[Batch]:
    """So many rows of the training text from its beginning, by themselves; the run's own stream stays where it is.

    Raises:
        DataError: the text ends before.
    """
    found: list[Batch] = []
    with closing(text.prepared.stream(recipe.data.seq_len)) as stream:
        while len(found) < rows:
            try:
                found.append(stream.next_step())
            except StopIteration:
                raise DataError(
                    f"adapter.calibrate: {rows} rows of {recipe.data.seq_len} tokens",
                    f"a text of {len(found)}",
                    "codes are learned from rows that are there",
                    f"adapter.calibrate={len(found)}" if found else "adapter.calibrate=0",
                ) from None
    return found


def calibration_phase(recipe: Any, model: nn.Module, structure: Structure) -> dict[str, int]:
    """Bytes above what rests while the base is learned, by phase; nothing where it is not."""
    rows = rows_asked(recipe)
    if not rows:
        return {}
    shapes = {
        name: (module.weight.shape[0], module.weight.shape[1])
        for name in match(model, structure, recipe.adapter.targets)
        if isinstance(module := model.get_submodule(name), CodedLinear)
    }
    itemsize = 2 if recipe.precision == "bf16" else 4
    tokens = recipe.data.seq_len
    return {"calibrate": peak_bytes(shapes, structure.blocks, tokens, rows, structure.hidden, itemsize)}
