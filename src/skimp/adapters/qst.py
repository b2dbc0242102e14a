"""QST on a model: the frozen backbone runs without a graph, a small side network reads it and trains.

    out = (1 - a) Up h + a norm(f_L),  logits = frozen head (out)

with h from `adapters.side` and a one number a channel. gate "paper": a itself trains and begins at 1, so that step 0
is the backbone to the bit; in that step only a moves, because Up's gradient has the factor 1 - a, and everything from
the second on. gate "sigmoid": a = sigmoid of what trains, which begins at 6, with Up at 0: logits begin as the
backbone's times 0.9975, and the side's blocks wake in the second step.

Backward needs nothing of the backbone: kept are the side's own activations, about 1 / r of a backbone's; f_l where the
downsampler trains; norm(f_L) and Up h for the gate; and the head's input. Recompute, offload and chunked MLPs mean the
side's blocks here. The side's keys and values lie in the backbone's cache, behind its layers, 1 / r of their size.

Not a change of weights: it is used attached, and exported by skimp's checkpoint alone.

Source: "Quantized Side Tuning: Fast and Memory-Efficient Tuning of Quantized Large Language Models", Zhang et al., ACL
2024, arXiv 2401.07159. The gate follows the paper; the published code passes it through a sigmoid with init 1, and so
begins 27 % off the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.handle import Handle, Row
from skimp.adapters.side import SideNetwork
from skimp.adapters.side_down import read_form
from skimp.core.errors import ConflictError, EffectError
from skimp.core.read import read
from skimp.core.structure import Structure

SIDE = "skimp_side"


class QST(Handle):
    """A side network on a frozen model; the handle that undoes it.

    Args:
        model: an HF causal language model, real or simulated; everything in it is frozen.
        structure: its roles.
        reduce: how many times narrower the side is. down: see `adapters.side_down`. gate: "paper" or "sigmoid".
        seed: address of the first numbers.

    Attributes:
        side: the trained modules, in the model under `skimp_side`.
        structure: the model's, with the side's blocks in the place of the backbone's: those that a run recomputes.

    Raises:
        ConflictError: a reduction that the widths do not allow, or another adapter on the model.
        SkimpError: an unknown downsampler.

    Example:
        >>> qst = QST(model, read_structure(model), reduce=16, down="avgpool")
        >>> optimizer = torch.optim.AdamW(qst.parameters(), lr=2e-4)
    """

    merges = False
    name = "qst"

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        reduce: int = 16,
        down: str = "adapter:16",
        gate: str = "paper",
        seed: int = 0,
    ) -> None:
        if hasattr(model, SIDE):
            raise ConflictError("a side network on this model", "it has one", instead="detach the first")
        read_form(down)
        self.model, self.backbone = model, structure
        self.asked = {"name": self.name, "reduce": reduce, "down": down, "gate": gate}
        self.side = SideNetwork(model, structure, reduce, down)
        self.side.begin(seed, 1.0 if gate == "paper" else 6.0, up=gate == "paper")
        self._freeze_base()
        model.add_module(SIDE, self.side)
        blocks = tuple(f"{SIDE}.rungs.{i}.block" for i in range(len(structure.blocks)))
        self.structure = replace(structure, blocks=blocks, hidden=structure.hidden // reduce)
        self.paper, self.rungs_run = gate == "paper", 0
        self._records = False
        self._h: Tensor | None = None
        self._hooks = [
            hook for index, name in enumerate(structure.blocks) for hook in self._tap(index, model.get_submodule(name))
        ]
        base: Any = model.get_submodule(structure.base)
        self._base, self._plain = base, base.forward
        base.forward = self._forward

    # ---- forwards

    def _tap(self, index: int, block: nn.Module) -> list[Any]:
        """Hooks that run the side's block `index` as soon as the backbone's has."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with torch.set_grad_enabled(self._records):
                self._h = self.side.rungs[0].down(args[0] if args else kwargs["hidden_states"])  # type: ignore[operator]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            tap = output if isinstance(output, Tensor) else output[0]
            with torch.set_grad_enabled(self._records):
                self._h = self._climb(index, tap, args, kwargs)

        hooks = [block.register_forward_hook(after, with_kwargs=True)]
        if index == 0:
            hooks.append(block.register_forward_pre_hook(before, with_kwargs=True))
        return hooks

    def _climb(self, index: int, tap: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """One rung, with the call of the backbone's block but for angles of the side's own width."""
        rung: Any = self.side.rungs[index]
        h = rung.mix(tap, self._h)
        given = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        if given.get("position_embeddings") is not None:
            given["position_embeddings"] = self.side.rotary(h, given["position_ids"])  # type: ignore[misc]
        self._make_room([*args, *given.values()])
        out = rung.block(h, *args[1:], **given)
        self.rungs_run += 1
        found: Tensor = out if isinstance(out, Tensor) else out[0]
        return found

    def _make_room(self, given: list[Any]) -> None:
        """A cache made for the backbone's layers alone gets layers for the side's behind them."""
        from transformers.cache_utils import Cache, DynamicLayer

        for cache in given:
            while isinstance(cache, Cache) and len(cache.layers) < 2 * len(self.side.rungs):
                cache.layers.append(DynamicLayer())  # type: ignore[no-untyped-call]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        self._records = torch.is_grad_enabled()
        with torch.no_grad():
            out = self._plain(*args, **kwargs)
        last, h = out.last_hidden_state, self._h
        self._h = None
        wide = last.to(self.side.gate.dtype)
        a = self.side.gate if self.paper else torch.sigmoid(self.side.gate)
        out.last_hidden_state = torch.lerp(self.side.up(self.side.norm(h)).to(wide.dtype), wide, a).to(last.dtype)
        return out

    # ---- the protocol

    @classmethod
    def attach(cls, model: nn.Module, structure: Structure, asked: Mapping[str, Any], seed: int) -> QST:
        return cls(model, structure, **{k: v for k, v in asked.items() if k != "name"}, seed=seed)

    @classmethod
    def rebuild(cls, model: nn.Module, structure: Structure, meta: Mapping[str, Any]) -> QST:
        return cls(model, structure, **{k: v for k, v in meta.items() if k != "name"})

    def meta(self) -> dict[str, Any]:
        return dict(self.asked)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((f"{SIDE}.{name}", p) for name, p in self.side.named_parameters())

    def additions(self) -> Iterator[Tensor]:
        yield from self.side.parameters()
        yield from self.side.buffers()

    def table(self) -> list[Row]:
        """One row for the side's blocks, one for the downsamplers with the mixing, one for the way back up."""
        width, hidden = self.structure.hidden, self.backbone.hidden
        parts: dict[str, list[Tensor]] = {"blocks": [], "down": [], "up, norm and gate": []}
        for name, p in self.side.named_parameters():
            leaf = "blocks" if ".block." in name else "down" if name.startswith("rungs.") else "up, norm and gate"
            parts[leaf].append(p)
        shapes = {"blocks": (width, width), "down": (width, hidden), "up, norm and gate": (hidden, width)}
        return [
            Row(
                f"{SIDE}.{leaf}", leaf, shapes[leaf], width, sum(p.numel() for p in found), sum(p.nbytes for p in found)
            )
            for leaf, found in parts.items()
        ]

    def asleep(self) -> frozenset[str]:
        """All but the gate, or with "sigmoid" all but the gate and Up: the others' gradients are 0 in step 1."""
        awake = {f"{SIDE}.gate"} if self.paper else {f"{SIDE}.gate", f"{SIDE}.up.weight", f"{SIDE}.up.bias"}
        return frozenset(name for name, _ in self.named_parameters() if name not in awake)

    def assert_effect(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """The side ran, and its gate moved.

        Raises:
            EffectError: it did not, or the backbone trains.
        """
        self.check_frozen()
        gate = f"{SIDE}.gate"
        if not self.rungs_run or read((before[gate] != after[gate]).any(), expect=1.0) == 0.0:
            raise EffectError(
                f"a side network of {len(self.side.rungs)} blocks",
                f"its blocks ran {self.rungs_run} times, and its gate did not move",
                "the base model's forward was replaced, or no gradient reached the gate",
            )

    @torch.no_grad()
    def detach(self, base: Mapping[str, Tensor] | None = None) -> None:
        """The backbone as it was, to the bit, training what it trained before; nothing of it was ever changed."""
        for hook in self._hooks:
            hook.remove()
        del self._base.forward
        del self.model._modules[SIDE]
        self._thaw_base()
