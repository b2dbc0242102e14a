"""A low-rank change into a weight and what it cost: the largest change, and the largest that the dtype lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skimp.adapters.spec import Spec
from skimp.core.read import read

#: Rows of a weight that are merged at once, so that no second weight exists: 4 Mi numbers, 16 MiB in float32.
NUMBERS = 2**22
A, B = "lora_A", "lora_B"


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


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[float, float]:
    """W += scale B A in place, slice by slice, one dtype wider than W; (largest change, largest rounding).

    Args:
        weight: (outputs, inputs), or a view of one stored the other way. a: (r, inputs). b: (outputs, r).
    """
    wide = torch.float64 if weight.dtype in (torch.float32, torch.float64) else torch.float32
    low, change, lost = a.to(wide), 0.0, 0.0
    step = max(1, NUMBERS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step]
        delta = torch.mm(b[start : start + step].to(wide), low).mul_(scale)
        change = max(change, read(torch.linalg.vector_norm(delta, ord=float("inf")), expect=0.0))
        exact = delta.add_(part)
        part.copy_(exact)
        lost = max(lost, read(torch.linalg.vector_norm(exact.sub_(part), ord=float("inf")), expect=0.0))
    return change, lost


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
        self.spec, self.get = Spec.from_dict(meta), get
        self.changed = frozenset(n.removesuffix(A) + "weight" for n in names if n.endswith(f".{A}"))

    def apply(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """W + s B A."""
        module = name.removesuffix(".weight")
        target = value.t() if transposed else value
        add_product(target, self.get(f"{module}.{A}"), self.get(f"{module}.{B}"), self.spec.factor(module))
        return value
