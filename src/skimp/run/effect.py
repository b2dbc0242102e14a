"""Did the techniques that were switched on do anything? Checked after the first optimizer step, by name.

Silence is the field's worst bug: a run that looks normal while nothing is trained or nothing is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core.errors import EffectError
from skimp.core.read import read
from skimp.run.build import Run

#: Numbers of each parameter that are remembered: small enough to cost nothing, enough to see it move.
SAMPLE = 64


class Effect:
    """Remembers a little of every parameter before the first step.

    Args:
        run: before its first step.
    """

    def __init__(self, run: Run) -> None:
        self._before = {name: _sample(p) for name, p in run.delivery.parameters.items()}
        self._forwards = run.stepper.forwards

    def check(self, run: Run, lr: float) -> None:
        """Raise `EffectError` for whatever did nothing.

        Args:
            run: after its first step.
            lr: the learning rate of that step.
        """
        if run.recompute is not None:
            run.recompute.assert_effect(run.stepper.forwards - self._forwards)
        held = [n for n, p in run.delivery.parameters.items() if p.grad is not None]
        if held:
            raise EffectError("gradients freed after the step", f"still held: {', '.join(held[:5])}")
        parameters = run.delivery.parameters
        # One Adam step moves a weight by about lr; float32 cannot show less than 6e-8 of it, bfloat16 rounds at random.
        visible = {n for n, p in parameters.items() if p.dtype == torch.float32 and lr > 2e-7}
        still = [n for n in self._before if n in visible and not _moved(self._before[n], _sample(parameters[n]))]
        if visible and len(still) > len(visible) // 2:
            raise EffectError(
                f"optimizer '{run.recipe.optimizer.name}' moves the parameters",
                f"{len(still)} of {len(visible)} did not move, first {still[0]}",
                "no gradient reached them, or the update rule skipped them",
                "check that the model's parameters require gradients",
            )
        states = sum(1 for p in parameters.values() if run.optimizer.state.get(p))
        if states < len(parameters):
            raise EffectError(
                f"optimizer state for {len(parameters)} parameters", f"{states}", "some were never given to the rule"
            )
        self._before.clear()


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].clone()


def _moved(before: Tensor, after: Tensor) -> bool:
    return read((before != after).any(), expect=1.0) != 0.0
