"""`attach`: put exact techniques into a finished Hugging Face trainer, and hold them to their effect.

The trainer stays what it is (its arguments, data, schedule, logging, checkpoints). Each technique goes in the way its
own room offers, in skimp's order of building; all of them are out again after `remove`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback

from skimp.activations.recompute import Recompute
from skimp.core import attention
from skimp.core.errors import ConflictError, EffectError
from skimp.core.exact import Keep
from skimp.core.structure import Structure, read_structure
from skimp.hf.backward import StepsInBackward
from skimp.hf.documents import Declared
from skimp.hf.forward import Forward
from skimp.hf.loss import ChunkedLoss
from skimp.hf.refuse import check
from skimp.kernels.apply import Fused


def causal_model(trainer: Any) -> nn.Module:
    """The language model itself, below PEFT's wrapper."""
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[no-any-return]


def attach(
    trainer: Any,
    *,
    recompute: Literal["all"] | Sequence[int] | None = None,
    fused: bool = False,
    chunked_loss: bool = False,
    documents: bool = False,
    step_in_backward: bool = False,
    positions: bool = False,
    keep: Keep = "nothing",
) -> Attached:
    """Put techniques into `trainer`; call it after the trainer is made and before `trainer.train()`.

    Args:
        trainer: a `transformers.Trainer` or `trl.SFTTrainer` over a causal language model, PEFT-wrapped or not.
        recompute: blocks to run again in backward: "all", or their indices.
        fused: RMSNorm and SwiGLU in one pass each (float32 or bfloat16 on a CPU, native kernels built).
        chunked_loss: cross-entropy a few tokens at a time: tokens × vocabulary logits never exist, in training or in
            an evaluation that asks for the loss only.
        documents: attention inside document boundaries that the collator declares (CPU); no S × S mask is built.
        step_in_backward: each parameter moves as soon as its gradient is final, which is then freed. Needs one of
            skimp's update rules; with `max_grad_norm` > 0 every batch runs forward and backward twice.
        positions: nothing but what every attached trainer has: the place of each forward in the run is declared, which
            skimp's LoRA needs for its dropout.
        keep: what recomputed blocks keep and do not make again: "attention" its output, "products" that of every
            matrix product.

    Returns:
        The handle: `remove()` takes everything out again. It is a callback of the trainer and checks after the first
        step that each technique acted.

    Raises:
        ConflictError: something in the trainer's arguments would break a technique or be broken by it.
        ModelError: not a causal language model of a structure skimp can read.
    """
    model = causal_model(trainer)
    structure = read_structure(model)
    chosen = range(len(structure.blocks)) if recompute == "all" else tuple(recompute or ())
    check(trainer, model, structure, chosen, fused, chunked_loss, documents, step_in_backward, positions)
    attached = Attached(trainer, model, structure)
    try:
        attached.put(chosen, fused, chunked_loss, documents, step_in_backward, keep)
    except BaseException:
        attached.remove()
        raise
    trainer.skimp = attached
    trainer.add_callback(attached)
    return attached


class Attached(TrainerCallback):
    """What `attach` put into one trainer.

    Attributes:
        recompute, fused, loss, backward: the techniques' own handles, None where not asked for.
        forward: counts forwards, and passes the collator's declarations on to attention.
    """

    def __init__(self, trainer: Any, model: nn.Module, structure: Structure) -> None:
        self.trainer, self.model, self.structure = trainer, model, structure
        self.fused: Fused | None = None
        self.recompute: Recompute | None = None
        self.loss: ChunkedLoss | None = None
        self.backward: StepsInBackward | None = None
        self.forward: Forward | None = None
        self._documents = False
        self._undo: list[Callable[[], Any]] = []
        self._checked = False

    def put(
        self,
        blocks: Sequence[int],
        fused: bool,
        chunked: bool,
        documents: bool,
        in_backward: bool,
        keep: Keep = "nothing",
    ) -> None:
        """Everything asked for, in the order of building: kernels, recompute, attention, loss, delivery."""
        if fused:
            self.fused = Fused(self.model, halves=True)
            self._undo.append(self.fused.remove)
            if not self.fused.norms and not self.fused.mlps:
                raise ConflictError(
                    "attach(fused=True)",
                    f"no norm and no activation that is known in '{type(self.model).__name__}'",
                    "there is nothing to fuse",
                    "leave fused out",
                )
        if blocks:
            # A model of other people may have dropout: the second run must draw what the first drew.
            names = [self.structure.blocks[i] for i in blocks]
            self.recompute = Recompute(self.model, names, keep_random_state=True, keep=keep)
            self._undo.append(self.recompute.remove)
        if documents:
            self._put_attention()
        self.forward = Forward(self.model, self.trainer)
        self._undo.append(self.forward.remove)
        if documents:
            self.forward.watch(self.model.get_submodule(self.structure.blocks[0]))
        if chunked:
            self.loss = ChunkedLoss(self.trainer, self.model, self.structure, self.forward)
            self._undo.append(self.loss.remove)
        if in_backward:
            self.backward = StepsInBackward(self.trainer, self.forward)
            self._undo.append(self.backward.remove)

    def _put_attention(self) -> None:
        model: Any = self.model
        plain, collator = model.config._attn_implementation, self.trainer.data_collator
        model.set_attn_implementation(attention.register())
        self._undo.append(lambda: model.set_attn_implementation(plain))
        self.trainer.data_collator = Declared(collator)
        self._undo.append(lambda: setattr(self.trainer, "data_collator", collator))
        self._documents = True

    def remove(self) -> None:
        """Take everything out again: model and trainer are what they were. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
        if getattr(self.trainer, "skimp", None) is self:
            del self.trainer.skimp
            self.trainer.remove_callback(self)

    # ---- the trainer's events
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between backward and `optimizer.step()`: the moment at which held gradients would be seen."""
        if self.backward is not None:
            self.backward.assert_freed()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step, hold every technique to its effect."""
        if not self._checked and self._undo:
            self.assert_effect()
            self._checked = True

    def assert_effect(self) -> None:
        """Did each technique act?

        Raises:
            EffectError: names the one that did nothing.
        """
        if self.forward is None or not self.forward.trained:
            raise EffectError(
                "attach: the model's forward runs in training",
                "it was never called",
                "the trainer trains another model, or replaced the forward after attach",
                "call attach last, on the trainer that trains",
            )
        if self.recompute is not None:
            self.recompute.assert_effect(self.forward.trained)
        if self.fused is not None:
            self.fused.assert_effect()
        if self.loss is not None:
            self.loss.assert_effect()
        if self._documents:
            self.forward.assert_documents()
        if self.backward is not None:
            self.backward.assert_effect()
