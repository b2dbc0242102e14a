"""Offload of activations: what a block keeps for backward waits on disk or in host memory and comes back in time.

Saves what the chosen blocks keep but for two of them; costs the transfer of their bytes out and back, beside the
computation. The numbers that come back are those that went, so the run is the same to the bit. A block that is
recomputed keeps only its input, and that is what goes.

Paper: "SSDTrain: An Activation Offloading Framework to SSDs for Faster LLM Training", Wu et al., 2024,
arXiv 2408.10013 (saved-tensor hooks, deduplication, forwarding); the two rounding buffers are those of "MEMO", Zhao et
al., 2024, arXiv 2407.12117, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.errors import EffectError
from skimp.core.memory.tracker import at
from skimp.core.saved import LEAST, Group, Saved, staying
from skimp.core.tiers import Tier


class Offload:
    """Move what chosen blocks keep to a tier; `remove` restores them.

    Args:
        model: any module.
        blocks: fully qualified names of all blocks, in the order of the forward pass.
        chosen: indices of those whose tensors move.
        tier: where to. It is closed by `remove`.
        least: tensors of fewer bytes stay.

    Example:
        >>> away = Offload(model, [f"model.layers.{i}" for i in range(30)], range(29), DiskTier(Path("scratch")))
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], chosen: Iterable[int], tier: Tier, least: int = LEAST
    ) -> None:
        self.blocks, self.chosen, self.tier = tuple(blocks), tuple(sorted(set(chosen))), tier
        self.saved = Saved(tier, least)
        self.forwards = dict.fromkeys(self.chosen, 0)
        self._modules = [model.get_submodule(name) for name in blocks]
        self._before: Group | None = None
        self._under = [module.__dict__.get("forward") for module in self._modules]
        for index, module in enumerate(self._modules):
            self._wrap(index, module)

    def _wrap(self, index: int, module: nn.Module) -> None:
        plain = module.forward
        last = index == len(self._modules) - 1
        moves = index in self.chosen

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not module.training or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            if index == 0:
                self.saved.discard()  # of a forward that broke off
                self._before = None
            before, group = self._before, None
            if moves:
                group = self.saved.begin(staying(module, args, kwargs))
                self.forwards[index] += 1
                with torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack):
                    out = plain(*args, **kwargs)
            else:
                out = plain(*args, **kwargs)
            self.saved.end(all_leave=last or not moves)
            self._before = group
            hidden = out if isinstance(out, Tensor) else out[0]
            if hidden.requires_grad and (group or before):
                hidden.register_hook(lambda _: self._backward(index, group, before))
            return out

        module.forward = forward

    def _backward(self, index: int, group: Group | None, before: Group | None) -> None:
        at(f"block {index}")  # what is read now is for this block and the one before it
        self.saved.backward(group, before)

    def remove(self) -> None:
        """Restore the blocks' own forward and give the tier's room back."""
        for module, under in zip(self._modules, self._under, strict=True):
            if under is None:
                del module.forward
            else:  # recompute, which was there first
                module.forward = under
        self.saved.discard()
        self.tier.close()

    def assert_effect(self, forwards: int, due: Iterable[str] | None = None) -> None:
        """Every chosen block went through the tier in every forward, and bytes came back from it.

        Args:
            forwards: training forwards of the model.
            due: names of blocks that keep anything, when others rest below all that trains; None for all.

        Raises:
            EffectError: a block kept everything here, or nothing was moved.
        """
        reached = set(self.blocks if due is None else due)
        idle = [self.blocks[i] for i, runs in self.forwards.items() if runs < forwards and self.blocks[i] in reached]
        if not any(self.blocks[i] in reached for i in self.chosen):
            return
        if idle or not self.saved.stored or not self.saved.fetched:
            raise EffectError(
                f"offload of {len(self.chosen)} blocks to {self.tier.place}",
                f"{self.saved.stored} tensors left, {self.saved.fetched} came back; {', '.join(idle) or 'all'} ran"
                if not idle
                else f"not moved: {', '.join(idle)}",
                "their activations were kept all the same",
                "check that the blocks are wrapped and keep tensors of a page or more",
            )


def choose(count: int, total: int) -> tuple[int, ...]:
    """Which `count` of `total` equal blocks move: the first, which backward needs last, so that their bytes have the
    longest time to go and to come back."""
    return tuple(range(min(count, total)))
