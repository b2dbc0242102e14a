"""From a backbone's hidden states (…, d) to a side network's width d' = d / r: pooling, a matrix, or a narrow pair.

Pooling has no parameters and keeps nothing for backward; what has a matrix keeps its input, T d numbers a layer.

Source: "Quantized Side Tuning", Zhang et al., ACL 2024, arXiv 2401.07159, section 3.2.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skimp.core.errors import SkimpError

FORMS = ("adapter:16", "lora:16", "linear", "avgpool", "maxpool")
_FORM = re.compile(r"(?:(adapter|lora):([1-9]\d*)|(linear|avgpool|maxpool))")


class Pool(nn.Module):
    """Mean or maximum of each window of r neighbours, in float32."""

    def __init__(self, width: int, largest: bool) -> None:
        super().__init__()
        self.width, self.largest = width, largest

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        windows: Tensor = wide.reshape(*x.shape[:-1], self.width, -1)
        return windows.amax(-1) if self.largest else windows.mean(-1)


class Linear(nn.Module):
    """One matrix d x d'."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, hidden, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight)


class Pair(nn.Module):
    """A: d -> k and B: k -> d'; as an adapter with silu between and a LayerNorm after, which outliers of the backbone
    would else blow up."""

    def __init__(self, hidden: int, width: int, k: int, adapter: bool) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(k, hidden, dtype=torch.float32))
        self.up = nn.Parameter(torch.empty(width, k, dtype=torch.float32))
        self.norm = nn.LayerNorm(width, dtype=torch.float32) if adapter else None

    def forward(self, x: Tensor) -> Tensor:
        thin = F.linear(x.to(self.down.dtype), self.down)
        if self.norm is None:
            return F.linear(thin, self.up)
        # float32 under autocast too: torch's fake form of a norm of another type than its gain is too small.
        normed: Tensor = self.norm(F.linear(F.silu(thin), self.up).to(self.up.dtype))
        return normed


def read_form(form: str) -> tuple[str, int]:
    """("adapter", 16) from "adapter:16"; 0 where there is no number.

    Raises:
        SkimpError: another form.
    """
    found = _FORM.fullmatch(form)
    if found is None:
        raise SkimpError(f"adapter.down: '{form}'", "no such form", instead=list(FORMS))
    return (found[1], int(found[2])) if found[1] else (found[3], 0)


def downsampler(form: str, hidden: int, width: int) -> nn.Module:
    """A module from (…, hidden) to (…, width) float32, its parameters not yet drawn.

    Raises:
        SkimpError: an unknown form, or a bottleneck as wide as what it joins.
    """
    kind, k = read_form(form)
    if kind in ("avgpool", "maxpool"):
        return Pool(width, kind == "maxpool")
    if kind == "linear":
        return Linear(hidden, width)
    if k >= hidden:
        raise SkimpError(
            f"adapter.down: '{form}'", f"hidden states of {hidden}", "a bottleneck is narrower", "adapter.down=linear"
        )
    return Pair(hidden, width, k, kind == "adapter")


def parameters_of(form: str, hidden: int, width: int) -> int:
    """Trained numbers of one downsampler, without building it."""
    kind, k = read_form(form)
    pair = k * (hidden + width)
    return {"linear": hidden * width, "lora": pair, "adapter": pair + 2 * width}.get(kind, 0)
