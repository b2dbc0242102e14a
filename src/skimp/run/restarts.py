"""From `train.restart` of a recipe to an event of the run: moments that begin anew, factors that are balanced.

Glentis et al., "Scalable Parameter and Memory Efficient Pretraining for LLM", 2025, arXiv 2505.22922, section 4. What a
restart does is in `optim.refactor`; when it is due, and the rate that climbs back, in `core.events`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from skimp.adapters.merge import A, B
from skimp.core.errors import ConflictError, EffectError
from skimp.core.events import Event, Firing, every
from skimp.core.memory.tracker import scope
from skimp.optim.refactor import reset_moments, restart_

Pairs = list[tuple[Tensor, Tensor]]


def restarts(
    recipe: Any, model: nn.Module, optimizer: Any, simulated: bool, said: Callable[[str], None]
) -> list[Event]:
    """The event that `train.restart` asks for; none where it asks for none.

    Args:
        simulated: before the second step whatever the period, so that a plan has seen it.
        said: told of every restart, in a sentence.

    Raises:
        ConflictError: nothing in the model is a product of two trained factors.
    """
    asked = recipe.train.restart
    if asked is None:
        return []
    pairs = pairs_of(model) if asked.refactor else []
    if asked.refactor and not pairs:
        raise ConflictError(
            "train.restart.refactor=true",
            f"no layer with trained {A} and {B} in a model with adapter {recipe.adapter.name}",
            "there is no product of two factors to balance",
            ["train.restart.refactor=false", "adapter=lora"],
        )

    def begin_anew(firing: Firing) -> None:
        with scope("workspace", "restart"):
            if asked.refactor:
                done, left = restart_(pairs, optimizer)
                said(f"restart: {done} pairs refactored, {left} left alone")
                return
            count = reset_moments(optimizer)
        if not count:
            raise EffectError(
                f"a momentum reset before step {firing.step + 1}", "no parameter has moments", "it would change nothing"
            )
        said(f"restart: moments of {count} parameters begin anew")

    period, warmup, until = (1, 0, None) if simulated else (asked.every, asked.warmup, asked.until)
    return [every(period, begin_anew, name="restart", moments="reset", warmup=warmup, until=until)]


def pairs_of(model: nn.Module) -> Pairs:
    """(B, A) of every layer that trains both as matrices."""
    found: Pairs = []
    for module in model.modules():
        up, down = (module._parameters.get(name) for name in (B, A))
        if up is not None and down is not None and up.requires_grad and down.requires_grad and up.ndim == 2:
            found.append((up, down))
    return found
