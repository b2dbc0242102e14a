"""When a loss is not finite or jumps: which parameter, and is the state before the step still whole?"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from skimp.core.errors import NonFiniteError
from skimp.core.read import read
from skimp.run.build import Run


@torch.no_grad()
def suspect(run: Run) -> tuple[str, bool]:
    """A sentence naming a parameter, and whether every parameter is finite.

    The first one that holds a NaN or an infinity; where all are finite, the one with the largest number in
    it, because that is where a forward pass overflows.
    """
    largest, where = -1.0, ""
    for name, parameter in run.delivery.parameters.items():
        # The largest magnitude; it is NaN as soon as one number is.
        top = read(torch.linalg.vector_norm(parameter, ord=float("inf")), expect=0.0)
        if top != top or top == float("inf"):
            return f"parameter {name} holds {'NaN' if top != top else 'an infinity'}", False
        if top > largest:
            largest, where = top, name
    return f"every parameter is finite, the largest number ({largest:.3g}) is in {where}", True


def spiked(run: Run, loss: float, recent: list[float], step: int, newest: Path | None) -> NonFiniteError | None:
    """The error for a loss above `train.spike.factor` times its recent median, or None."""
    rule, usual = run.recipe.train.spike, median(recent)
    if loss <= rule.factor * usual:
        return None
    sentence, _ = suspect(run)
    return NonFiniteError(
        f"a loss within {rule.factor:g} times its recent level in optimizer step {step}",
        f"{loss:.4g}; the median of the last {rule.window} is {usual:.4g}; {sentence}",
        "a jump like this seldom heals",
        [
            f"go on past it from {newest}: --resume train.spike.factor={2 * loss / usual:.1f}"
            if newest
            else "there is no checkpoint yet: set checkpoint.every",
            "start another run with a lower train.lr, in another output folder",
        ],
    )
