"""Recompute: keep only a block's input for backward and run the block again when its gradients are due.

Saves everything a block would keep but its input; costs that block's forward once more. A model with `n` of `L`
blocks wrapped keeps n inputs and (L - n) full sets, plus one full set while a wrapped block is in backward.

Paper: "Training Deep Nets with Sublinear Memory Cost", Chen et al., 2016, arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skimp.activations.selective import Kept
from skimp.core.errors import EffectError
from skimp.core.exact import Keep
from skimp.core.memory.tracker import numbers_seen


class Recompute:
    """Wrap chosen blocks of a model; `remove` restores them.

    Only the non-reentrant form is used: it composes with step-in-backward, frozen inputs and saved-tensor hooks.
    The second run sees the context variables of the first (document boundaries, the target of a simulation).
    Random state is not replayed in skimp's own runs, because nothing in a block draws from the global generator
    (dropout is off); `keep_random_state` replays it for models of other people.

    Args:
        model: any module.
        blocks: fully qualified names of the blocks to wrap.
        keep_random_state: put torch's generator back for the second run, so that dropout draws the same mask.
        keep: what is kept besides the inputs, and not made again (`activations.selective`); one word, or one a block.

    Example:
        >>> with_less = Recompute(model, [f"model.layers.{i}" for i in range(12)])
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[str],
        keep_random_state: bool = False,
        keep: Keep | Sequence[Keep] = "nothing",
    ) -> None:
        self.blocks = tuple(blocks)
        self._replay = keep_random_state
        self._modules = [model.get_submodule(name) for name in self.blocks]
        self.runs = dict.fromkeys(self.blocks, 0)
        words = (keep,) * len(self.blocks) if isinstance(keep, str) else tuple(keep)
        self.keep: dict[str, Keep] = dict(zip(self.blocks, words, strict=True))
        #: results that second runs took instead of making them again.
        self.taken = dict.fromkeys(self.blocks, 0)
        for name, module in zip(self.blocks, self._modules, strict=True):
            self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        plain = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.runs[name] += 1
            with numbers_seen():
                return plain(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training or not _wants_grad(args, module):
                return plain(*args, **kwargs)
            # Backward comes when the forward's declarations are gone: without its context variables the second run
            # would attend across documents.
            context = copy_context()
            options: Any = {"use_reentrant": False, "preserve_rng_state": self._replay}
            if self.keep[name] != "nothing":
                options["context_fn"] = partial(self._contexts, name)
            return checkpoint(context.run, run, *args, **options, **kwargs)

        module.forward = forward

    def _contexts(self, name: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the first and the second run of one forward."""
        kept = Kept(self.keep[name], lambda: self._took(name))
        return kept.first(), kept.again()

    def _took(self, name: str) -> None:
        self.taken[name] += 1

    def remove(self) -> None:
        """Restore the blocks' own forward."""
        for module in self._modules:
            del module.forward

    def assert_effect(self, forwards: int, due: Iterable[str] | None = None) -> None:
        """Each wrapped block ran twice per training forward, and its second run took what it should have kept.

        Args:
            forwards: training forwards of the model.
            due: names of blocks that backward reaches, when others rest below all that trains; None for all.

        Raises:
            EffectError: a block was not run again, so nothing was saved there; or it made everything again.
        """
        reached = set(self.blocks if due is None else due)
        idle = [name for name, runs in self.runs.items() if runs < 2 * forwards and name in reached]
        if idle:
            raise EffectError(
                f"recompute of {len(self.blocks)} blocks",
                f"not run again in backward: {', '.join(idle)}",
                "their activations were kept all the same",
                "check that the blocks' inputs or weights need gradients",
            )
        idle = [n for n, taken in self.taken.items() if taken < forwards and n in reached and self.keep[n] != "nothing"]
        if idle:
            raise EffectError(
                f"recompute that keeps {', '.join(sorted({self.keep[n] for n in idle}))}",
                f"everything was made again in {', '.join(idle)}",
                "no operator of that kind ran in the block",
                "exact.keep=nothing",
            )


def _wants_grad(args: tuple[Any, ...], module: nn.Module) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(a, Tensor) and a.requires_grad for a in args) or any(
        p.requires_grad for p in module.parameters()
    )


def choose(count: int, total: int) -> tuple[int, ...]:
    """Which `count` of `total` equal blocks to recompute: the first ones.

    All equal subsets of equal blocks save the same; the first blocks are the last in backward, so the blocks kept
    (the last ones) are freed before the first recomputation starts, and the recomputed set never sits on top of
    a full house: peak = kept sets, or one set on top of what is left, whichever is larger.
    """
    return tuple(range(min(count, total)))
