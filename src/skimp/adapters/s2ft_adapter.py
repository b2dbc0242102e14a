"""Trained slices apart from any model: added to a base, switched, fused with others, and written for PEFT.

A slice by original numbers costs k x width numbers a layer. Adding it touches those entries alone (k x width additions,
where a low-rank product costs 2 r inputs outputs); adapters on disjoint slices do not touch each other's.

As a LoRA of rank k: columns S are B A with A the one-hot selector (k, inputs) of S and B the delta; rows S are A the
delta and B the one-hot (outputs, k). Its scale alpha / r must be 1, so every layer has its own rank and the same alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.partial_linear import Side
from skimp.adapters.s2ft_select import Slice
from skimp.adapters.targets import is_transposed
from skimp.core.errors import ConflictError, SkimpError
from skimp.core.read import read

#: PEFT's names of an adapter's tensors begin so.
PREFIX = "base_model.model."


def slice_of(target: Tensor, side: Side, index: Tensor, value: Tensor | None = None) -> Tensor:
    """Columns or rows `index` of a (outputs, inputs) weight; set to `value` when given."""
    dim = 1 if side == "columns" else 0
    if value is not None:
        target.index_copy_(dim, index, value)
        return value
    return target.index_select(dim, index)


def add_slice(target: Tensor, side: Side, index: Tensor, delta: Tensor, weight: float = 1.0) -> tuple[float, float]:
    """target's slice += weight x delta, one dtype wider; (largest change, largest rounding)."""
    wide = torch.float64 if target.dtype in (torch.float32, torch.float64) else torch.float32
    moved = delta.to(wide) * weight
    change = read(torch.linalg.vector_norm(moved, ord=float("inf")), expect=0.0)
    exact = moved.add_(slice_of(target, side, index))
    slice_of(target, side, index, exact.to(target.dtype))
    exact.sub_(slice_of(target, side, index))
    return change, read(torch.linalg.vector_norm(exact, ord=float("inf")), expect=0.0)


class SliceAdapter:
    """Layer -> slice and delta.

    Args:
        slices: layer -> rows or columns by original number.
        delta: gives a layer's numbers, (outputs, k) or (k, inputs), in the order of its index; may read from a file.
    """

    def __init__(self, slices: Mapping[str, Slice], delta: Callable[[str], Tensor]) -> None:
        self.slices, self.delta = dict(slices), delta
        self.changed = frozenset(f"{name}.weight" for name in self.slices)

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """A weight with its slice added; see `Merging`."""
        layer = name.removesuffix(".weight")
        chosen = self.slices[layer]
        index = torch.tensor(chosen.index, device=value.device)
        add_slice(value.t() if transposed else value, chosen.side, index, self.delta(layer))
        return value

    def overlaps(self, other: SliceAdapter) -> list[str]:
        """Layers in which both change some entry."""
        found = []
        for name in self.slices.keys() & other.slices.keys():
            one, two = self.slices[name], other.slices[name]
            if one.side != two.side or set(one.index) & set(two.index):
                found.append(name)
        return sorted(found)

    def peft(
        self, base_name: str, shapes: Mapping[str, tuple[int, ...]], transposed: bool
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """adapter_config.json and tensors for PEFT.

        Args:
            base_name: what PEFT shall load as the base.
            shapes: layer -> (outputs, inputs). transposed: its layers store (inputs, outputs).
        """
        tensors: dict[str, Tensor] = {}
        ranks = {name: len(chosen.index) for name, chosen in self.slices.items()}
        for name, chosen in self.slices.items():
            outputs, inputs = shapes[name]
            delta = self.delta(name).detach().cpu().contiguous()
            one_hot = torch.zeros(len(chosen.index), inputs if chosen.side == "columns" else outputs, dtype=delta.dtype)
            one_hot[torch.arange(len(chosen.index)), torch.tensor(chosen.index)] = 1.0
            a, b = (one_hot, delta) if chosen.side == "columns" else (delta, one_hot.t().contiguous())
            tensors[f"{PREFIX}{name}.lora_A.weight"], tensors[f"{PREFIX}{name}.lora_B.weight"] = a, b
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": max(ranks.values()),
            "lora_alpha": max(ranks.values()),
            "lora_dropout": 0.0,
            "target_modules": list(ranks),
            # Without the second pattern PEFT would scale each layer by alpha / its own rank, and say nothing.
            "rank_pattern": ranks,
            "alpha_pattern": dict(ranks),
            "bias": "none",
            "fan_in_fan_out": transposed,
            "init_lora_weights": True,
            "inference_mode": True,
        }
        return config, tensors


class Served:
    """Adapters in the weights of one base, switched by adding and subtracting; the base comes back to the bit.

    Args:
        model: the plain base, no adapter attached. A copy of each changed slice is kept while it is changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._base: list[tuple[str, Slice, Tensor]] = []

    def _weight(self, name: str) -> Tensor:
        module: Any = self.model.get_submodule(name)
        weight: Tensor = module.weight
        return weight.t() if is_transposed(module) else weight

    @torch.no_grad()
    def switch(self, adapter: SliceAdapter) -> None:
        """The base with this adapter alone."""
        self.fuse([adapter])

    @torch.no_grad()
    def fuse(self, adapters: Sequence[SliceAdapter], weights: Sequence[float] | None = None) -> None:
        """The base with the weighted sum of these adapters; exact where they are disjoint, a blend elsewhere.

        Raises:
            SkimpError: not as many weights as adapters, or the same layer by rows and by columns.
        """
        factors = [1.0] * len(adapters) if weights is None else list(weights)
        if len(factors) != len(adapters):
            raise SkimpError("fuse", f"{len(adapters)} adapters and {len(factors)} weights", "each has one")
        self.restore()
        for adapter, factor in zip(adapters, factors, strict=True):
            for name, chosen in adapter.slices.items():
                target = self._weight(name)
                index = torch.tensor(chosen.index, device=target.device)
                self._base.append((name, chosen, slice_of(target, chosen.side, index)))
                add_slice(target, chosen.side, index, adapter.delta(name).to(target.device), factor)

    @torch.no_grad()
    def restore(self) -> None:
        """The base again, to the bit: copies go back in the reverse order in which they were taken."""
        while self._base:
            name, chosen, kept = self._base.pop()
            target = self._weight(name)
            slice_of(target, chosen.side, torch.tensor(chosen.index, device=target.device), kept)


def side_by_side(model: nn.Module, adapters: Sequence[SliceAdapter], which: Sequence[int | None]) -> Callable[[], None]:
    """Serve one batch with an adapter for each row, on one base: y += x[:, S] D' (columns), y[:, S] += x D' (rows).

    Args:
        model: the plain base. which: for every row of the coming batches the number of its adapter, None for the base.

    Returns:
        A call that takes the adapters off again.
    """
    hooks = []
    layers = dict.fromkeys(name for adapter in adapters for name in adapter.slices)
    for name in layers:
        module: Any = model.get_submodule(name)
        parts = [(i, a.slices[name], a.delta(name)) for i, a in enumerate(adapters) if name in a.slices]
        hooks.append(module.register_forward_hook(_served(parts, which)))

    def off() -> None:
        for hook in hooks:
            hook.remove()

    return off


def _served(parts: list[tuple[int, Slice, Tensor]], which: Sequence[int | None]) -> Callable[..., Tensor]:
    def add(module: Any, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
        (x,) = given
        if x.shape[0] != len(which):
            raise ConflictError(
                "adapters side by side", f"{x.shape[0]} rows, {len(which)} were named", "each row has its own adapter"
            )
        y = y.clone()
        for number, chosen, delta in parts:
            rows = torch.tensor([i for i, one in enumerate(which) if one == number], device=x.device)
            index, low = torch.tensor(chosen.index, device=x.device), delta.to(x.dtype)
            own = x.index_select(0, rows)
            if chosen.side == "columns":
                y.index_add_(0, rows, own.index_select(-1, index) @ low.t())
            else:
                change = torch.zeros_like(y.index_select(0, rows))
                y.index_add_(0, rows, change.index_add_(-1, index, own @ low.t()))
        return y

    return add
