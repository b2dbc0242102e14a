"""The one place where a trainer's batch meets the model: declarations in, forwards counted, no cache in training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from skimp.core import attention
from skimp.core.errors import EffectError
from skimp.core.position import declared_position

#: More rows than one process has in a step, so that no two processes share an address.
ROWS_OF_A_PROCESS = 2**20

#: The key under which a collator declares document boundaries; see `skimp.hf.documents`.
DOCUMENTS = "documents"


class Forward:
    """Stands before `model.forward` (and before what the trainer put there itself, such as TRL's head).

    Args:
        model: the causal language model.
        trainer: says which optimizer step it is; without it no position is declared.

    Attributes:
        trained: forwards that built a graph.
        declared: those whose batch declared documents.
        instead: a forward to run in place of the model's own; it gets the same arguments, and None passes on.
    """

    def __init__(self, model: nn.Module, trainer: Any = None) -> None:
        self.model = model
        self._trainer = trainer
        self._step, self._tokens = -1, 0
        self.trained = self.declared = 0
        self.instead: Callable[..., Any] | None = None
        self._plain = model.forward
        # TRL puts its head into the instance, so "give the class's own back" would take that away as well.
        self._own = model.__dict__.get("forward")
        self._masked = 0
        self._watch: Any = None

        # With the plain signature: a trainer drops the columns of its data that forward does not name.
        @functools.wraps(self._plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(*args, **kwargs)

        model.forward = self._put = forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        documents = kwargs.pop(DOCUMENTS, None)
        if documents is not None:
            kwargs["attention_mask"] = None  # the boundaries say the same
        if self.model.training and torch.is_grad_enabled():
            self.trained += 1
            self.declared += documents is not None
            # A block that runs again would append its keys to the cache a second time.
            kwargs["use_cache"] = False
        declared = attention.declared(documents) if documents is not None else contextlib.nullcontext()
        with declared, self._position(args, kwargs):
            out = self.instead(*args, **kwargs) if self.instead is not None else None
            return self._plain(*args, **kwargs) if out is None else out

    def _position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Declare which rows of which optimizer step these are: dropout of additions is addressed by it."""
        ids = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        if self._trainer is None or ids is None or not self.model.training:
            return contextlib.nullcontext()
        if self._trainer.state.global_step != self._step:
            self._step, self._tokens = self._trainer.state.global_step, 0
        rows, width = ids.shape[:2]
        # Whole rows of this width that lie past every token so far: batches padded to other widths share no number.
        first = -(-self._tokens // width)
        self._tokens = (first + rows) * width
        return declared_position(self._step, self._trainer.args.process_index * ROWS_OF_A_PROCESS + first)

    def again(self) -> None:
        """The step's rows come once more: what is addressed by them must be the same."""
        self._tokens = 0

    def watch(self, block: nn.Module) -> None:
        """Count, until `assert_documents`, how often a block gets a mask: with declared documents it must not."""

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._masked += kwargs.get("attention_mask") is not None

        self._watch = block.register_forward_pre_hook(before, with_kwargs=True)

    def assert_documents(self) -> None:
        """Attention got boundaries and no mask.

        Raises:
            EffectError: no batch declared documents, or attention is another one and got a mask.
        """
        if self._watch is not None:
            self._watch.remove()
        if not self.declared:
            raise EffectError(
                "attach(documents=True)",
                "no batch declared its documents",
                "the trainer does not use the collator that attach put in",
                "set data_collator before attach",
            )
        model: Any = self.model
        if self._masked or model.config._attn_implementation != attention.NAME:
            raise EffectError(
                "attach(documents=True)",
                f"attention '{model.config._attn_implementation}', masks in {self._masked} forwards",
                "it was replaced after attach, and knows nothing of documents",
                "choose the attention before attach, or leave documents out",
            )

    def remove(self) -> None:
        """Give the model its forward back."""
        if self._watch is not None:
            self._watch.remove()
        if self.model.__dict__.get("_original_forward") is self._put:
            del self.model._original_forward  # Accelerate's note of what it wrapped for mixed precision
        if self._own is None:
            del self.model.forward
        else:
            self.model.forward = self._own


def give_methods_back(trainer: Any, **plain: Any) -> None:
    """A trainer's methods as they were: the class's own, or the instance's own from before."""
    for name, method in plain.items():
        trainer.__dict__.pop(name, None)
        if getattr(trainer, name) != method:
            setattr(trainer, name, method)
