"""Step-in-backward in a trainer: parameters move inside `training_step`; the trainer's own step finds nothing to do.

With `max_grad_norm` > 0 each batch runs twice, the first time for the norm only, so that clipping stays that of the
whole gradient. Random state is put back between the two, so that dropout draws the same masks. The logged
`grad_norm` is the true one: by the time the trainer looks, all gradients are gone and it would find 0.
"""

from __future__ import annotations

from typing import Any

from skimp.core import rng
from skimp.core.errors import EffectError
from skimp.core.gradients import Delivered, InBackward
from skimp.hf.forward import Forward, give_methods_back


class StepsInBackward:
    """Takes the place of a trainer's `training_step` and corrects what it logs."""

    def __init__(self, trainer: Any, forward: Forward) -> None:
        self.trainer = trainer
        self._forward = forward
        self.rule = trainer.optimizer
        clip = trainer.args.max_grad_norm
        named = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
        self.delivery = InBackward(named, self.rule, clip if clip and clip > 0 else None)
        self.last: Delivered | None = None
        self._plain_step, self._plain_log = trainer.training_step, trainer.log
        trainer.training_step, trainer.log = self.training_step, self.log

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.training_step`, after which all parameters have moved and no gradient is left.

        Raises:
            NonFiniteError: the gradient is not finite; with clipping no parameter has moved.
        """
        passes = self.delivery.passes
        random = rng.capture() if passes > 1 else {}
        seen = getattr(self.trainer, "_total_train_tokens", None)
        loss = None
        for index in range(passes):
            if index > 0:
                rng.restore(random)
                self._forward.again()
                if seen is not None:  # TRL counts tokens in its loss: once a batch, not once a pass
                    self.trainer._total_train_tokens = seen
            self.delivery.begin(index)
            loss = self._plain_step(model, dict(inputs), *args, **kwargs)
            self.last = self.delivery.end(index)
        return loss

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.log`, with the norm that was delivered."""
        if "grad_norm" in logs and self.last is not None:
            logs["grad_norm"] = self.last.norm
        return self._plain_log(logs, *args, **kwargs)

    def assert_freed(self) -> None:
        """No gradient outlived the step.

        Raises:
            EffectError: names the first that did.
        """
        held = [name for name, p in self.delivery.parameters.items() if p.grad is not None]
        if held:
            raise EffectError(
                "attach(step_in_backward=True)",
                f"{len(held)} gradients were held after backward, first {held[0]}",
                "no memory was saved",
                "call attach last",
            )

    def assert_effect(self) -> None:
        """Most parameters moved in the last step; a mixture of experts may leave some out of one.

        Raises:
            EffectError: no step was made, or half of the parameters had no gradient in it.
        """
        steps, count = self.delivery.step_index, len(self.delivery.parameters)
        idle = count - len(self.delivery.seen)
        if not steps or 2 * idle > count:
            raise EffectError(
                "attach(step_in_backward=True)",
                f"{steps} steps; {idle} of {count} parameters had no gradient in the last",
                "no gradient reached them in backward",
                "call attach last, on the trainer that trains",
            )

    def remove(self) -> None:
        """Hooks away, the trainer's own methods again."""
        self.delivery.close()
        give_methods_back(self.trainer, training_step=self._plain_step, log=self._plain_log)
