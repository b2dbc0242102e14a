"""Chunked cross-entropy in a trainer: its `compute_loss` asks the model for the loss only, and no logits are made.

Hugging Face's forward makes tokens × vocabulary logits, a float32 copy of them and their gradient: 12 bytes a number
in float32. TRL's own head works in tiles too, but keeps nothing and multiplies with the head a fourth time in
backward; this one forms its gradients in the forward pass (see `skimp.losses.cross_entropy`).

The divisor is the trainer's own: the trained tokens of all micro-batches of the optimizer step where it counts them.
Under TRL its metrics `entropy` and `mean_token_accuracy` are not logged: both need every logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from skimp.core.batch import IGNORE
from skimp.core.errors import EffectError
from skimp.core.read import read
from skimp.core.structure import Structure
from skimp.hf.forward import Forward, give_methods_back
from skimp.losses import linear_cross_entropy

#: Arguments of a causal model's forward that are for its head or its caller, not for the model below the head.
HEAD_ONLY = ("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "return_dict", "fused_lm_head")


@dataclass(frozen=True)
class Asked:
    """A loss asked for: its divisor (None: this batch's trained tokens) and label smoothing."""

    normaliser: float | None
    smoothing: float


_asked: ContextVar[Asked | None] = ContextVar("skimp_hf_loss", default=None)


@contextmanager
def asking(asked: Asked) -> Iterator[None]:
    """The model's forward inside gives this loss and no logits."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


class ChunkedLoss:
    """Takes the place of a trainer's `compute_loss` and, where only the loss is wanted, of its `prediction_step`.

    Attributes:
        losses: how many were computed in chunks.
        logits: how often the head ran as a module in training all the same.
    """

    def __init__(self, trainer: Any, model: nn.Module, structure: Structure, forward: Forward) -> None:
        self.trainer, self.model, self.structure = trainer, model, structure
        self.losses = self.logits = 0
        self._plain_loss, self._plain_prediction = trainer.compute_loss, trainer.prediction_step
        self._forward = forward
        forward.instead = self._loss_only
        trainer.compute_loss, trainer.prediction_step = self.compute_loss, self.prediction_step
        self._hook = model.get_submodule(structure.head).register_forward_hook(self._head_ran)

    def _head_ran(self, *_: Any) -> None:
        self.logits += self.model.training and torch.is_grad_enabled()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As `Trainer.compute_loss`. Where the outputs are wanted too, so are the logits, and nothing is changed."""
        if return_outputs or inputs.get("labels") is None:
            return self._plain_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        items = num_items_in_batch
        count = None if items is None else read(items, expect=1.0) if isinstance(items, Tensor) else float(items)
        smoothing = self.trainer.args.label_smoothing_factor
        # A step without a trained token has a sum of 0; so it is divided by 1, as TRL does.
        with asking(Asked(None if count is None else max(1.0, count), smoothing)):
            loss = model(**inputs)["loss"]
        if self.trainer.args.average_tokens_across_devices and items is not None:
            loss = loss * self.trainer.accelerator.num_processes
        return loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As `Trainer.prediction_step`: the loss in chunks where only the loss is asked for."""
        if not prediction_loss_only or inputs.get("labels") is None:
            answer: tuple[Any, Any, Any] = self._plain_prediction(model, inputs, prediction_loss_only, ignore_keys)
            return answer
        inputs = self.trainer._prepare_inputs(inputs)
        with torch.no_grad(), self.trainer.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def _loss_only(self, *args: Any, **kwargs: Any) -> CausalLMOutput | None:
        """In place of the model's forward: hidden states, then the loss. None where logits were asked for."""
        asked = _asked.get()
        if asked is None:
            return None
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        below = {key: value for key, value in kwargs.items() if key not in HEAD_ONLY}
        hidden = self.model.get_submodule(self.structure.base)(*args, **below | {"use_cache": False}).last_hidden_state
        head: Any = self.model.get_submodule(self.structure.head)
        if shifted is None:
            assert labels is not None
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        self.losses += 1
        scale = self.structure.logit_scale
        return CausalLMOutput(
            loss=linear_cross_entropy(
                hidden,
                head.weight,
                shifted.to(hidden.device),
                bias=head.bias,
                normaliser=asked.normaliser,
                label_smoothing=asked.smoothing,
                softcap=self.structure.softcap,
                logit_scale=None if scale == 1.0 else scale,
            )
        )

    def assert_effect(self) -> None:
        """Losses came from chunks, and the head made no logits in training.

        Raises:
            EffectError: says which.
        """
        self._hook.remove()
        if not self.losses or self.logits:
            raise EffectError(
                "attach(chunked_loss=True)",
                f"{self.losses} losses in chunks; the head made whole logits {self.logits} times in training",
                "the trainer's loss does not come from compute_loss, or something asks the model for its outputs",
                "leave chunked_loss out, or call attach last",
            )

    def remove(self) -> None:
        """The trainer's own methods again."""
        self._hook.remove()
        self._forward.instead = None
        give_methods_back(self.trainer, compute_loss=self._plain_loss, prediction_step=self._plain_prediction)
