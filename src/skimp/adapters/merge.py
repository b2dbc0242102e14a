"""A low-rank change into a weight and what it cost: the largest change, and the largest that the dtype lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skimp.adapters.norms import Pair
from skimp.adapters.spec import Spec
from skimp.core.read import read

#: Rows of a weight that are merged at once, so that no second weight exists: 4 Mi numbers, 16 MiB in float32.
NUMBERS = 2**22
A, B, A0, B0, MAGNITUDE = "lora_A", "lora_B", "lora_A0", "lora_B0", "lora_magnitude_vector"


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes:
        modules: how many weights changed.
        change: the largest change of a weight.
        rounding: the largest difference between a stored weight and W + s B A in float32 (float64 for a float32
            weight): about 4e-3 of the weight's size in bfloat16, 6e-8 in float32.
        logits: the largest difference of the probe's logits, None without one.
    """

    modules: int
    change: float
    rounding: float
    logits: float | None = None

    def __str__(self) -> str:
        text = f"{self.modules} weights changed by at most {self.change:.3g}, rounded by at most {self.rounding:.2g}"
        return text if self.logits is None else f"{text}; logits differ by at most {self.logits:.2g}"


def add_products(
    weight: Tensor, pairs: Sequence[Pair], magnitude: Tensor | None = None
) -> tuple[float, float, Tensor | None]:
    """W += Σ s B A in place, slice by slice, one dtype wider than W; with a magnitude each row is then given that norm.

    Args:
        weight: (outputs, inputs), or a view of one stored the other way. pairs: A (r, inputs), B (outputs, r) and s.
        magnitude: (outputs,) or None.

    Returns:
        The largest change, the largest rounding, and what the rows were multiplied by, (outputs,) in W's dtype.
    """
    wide = torch.float64 if weight.dtype in (torch.float32, torch.float64) else torch.float32
    lows, change, lost = [a.to(wide) for a, _, _ in pairs], 0.0, 0.0
    gain = None if magnitude is None else torch.empty_like(weight[:, 0])
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        stop = min(start + step, weight.shape[0])
        part = weight[start:stop]
        delta = torch.mm(pairs[0][1][start:stop].to(wide), lows[0]).mul_(pairs[0][2])
        for low, (_, b, s) in zip(lows[1:], pairs[1:], strict=True):
            delta.addmm_(b[start:stop].to(wide), low, alpha=s)
        if magnitude is not None and gain is not None:
            delta.add_(part)
            lengths = torch.linalg.vector_norm(delta, dim=1).clamp_min_(torch.finfo(torch.float32).tiny)
            factor = magnitude[start:stop].to(wide) / lengths
            gain[start:stop] = factor
            delta.mul_(factor.unsqueeze(1)).sub_(part)
        change = max(change, read(torch.linalg.vector_norm(delta, ord=float("inf")), expect=0.0))
        exact = delta.add_(part)
        part.copy_(exact)
        lost = max(lost, read(torch.linalg.vector_norm(exact.sub_(part), ord=float("inf")), expect=0.0))
    return change, lost, gain


def largest_gap(before: Tensor, probe: Callable[[], Tensor] | None) -> float | None:
    """Largest absolute difference between logits then and now."""
    if probe is None:
        return None
    return read(torch.linalg.vector_norm(probe().float() - before, ord=float("inf")), expect=0.0)


class Sums:
    """Saved low-rank additions as changes of weights (`handle.Merging`).

    Args:
        meta: the adapter's. names, get: its saved tensors.
    """

    def __init__(self, meta: Mapping[str, Any], names: frozenset[str], get: Callable[[str], Tensor]) -> None:
        self.spec, self.names, self.get = Spec.from_dict(meta), names, get
        self.changed = frozenset(n.removesuffix(A) + "weight" for n in names if n.endswith(f".{A}"))

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """W + s (B A - B0 A0), its rows given the trained norms where they have some."""
        module = name.removesuffix(".weight")
        magnitude = self.get(f"{module}.{MAGNITUDE}") if f"{module}.{MAGNITUDE}" in self.names else None
        add_products(value.t() if transposed else value, self.pairs(module), magnitude)
        return value

    def pairs(self, module: str) -> list[Pair]:
        """The products that are added to a weight, the trained one first."""
        scale = self.spec.factor(module)
        found: list[Pair] = [(self.get(f"{module}.{A}"), self.get(f"{module}.{B}"), scale)]
        if f"{module}.{A0}" in self.names:
            found.append((self.get(f"{module}.{A0}"), self.get(f"{module}.{B0}"), -scale))
        return found
