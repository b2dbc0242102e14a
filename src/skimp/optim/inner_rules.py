"""Lion, Adafactor and Muon as inner rules of the projected family: the very operators of the plain rules.

Each steps a tensor of zeros without decay, which afterwards holds the move. With the identity for a projection the
weights are those of `lion`, `adafactor` and of `muon` on a hidden matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.newton_schulz import newton_schulz
from skimp.core.sharded import Part
from skimp.optim.adafactor import adafactor, factored_spec
from skimp.optim.inner import Adam, Codec, Inner
from skimp.optim.lion import lion
from skimp.optim.state import Spec

NAMES = ("adam", "lion", "adafactor", "muon")


@dataclass(frozen=True)
class Sign:
    """Lion: the sign of a blended gradient. State: m shaped like it."""

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        return {"m": (tuple(shape), dtype)}

    def move(
        self, g: Tensor, state: dict[str, Any], lr: float, step: int, group: Mapping[str, Any], name: str
    ) -> Tensor:
        move, (beta1, beta2) = torch.zeros_like(g), group["betas"]
        scalars = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr, 1.0)
        lion(Part(name, g.numel(), 0, name), move, g.contiguous(), [state["m"]], scalars, step, 0)
        return move


@dataclass(frozen=True)
class Factored:
    """Adafactor without momentum. State: a row and a column."""

    decay: float = 0.8
    clip: float = 1.0

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        return factored_spec(shape, dtype)

    def move(
        self, g: Tensor, state: dict[str, Any], lr: float, step: int, group: Mapping[str, Any], name: str
    ) -> Tensor:
        move, held = torch.zeros_like(g), [state[key] for key in ("v", "rows", "columns") if key in state]
        scalars = [1.0 - float(step) ** -self.decay, self.clip, 0.0, lr, 0.0]
        adafactor(move, g.contiguous(), held, scalars, False, 0, step)
        return move


@dataclass(frozen=True)
class Orthogonal:
    """Muon on the small matrix: momentum, orthogonalised, as large as an Adam move there. State: m shaped like it."""

    momentum: float = 0.95
    ns_steps: int = 5

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        return {"m": (tuple(shape), dtype)}

    def move(
        self, g: Tensor, state: dict[str, Any], lr: float, step: int, group: Mapping[str, Any], name: str
    ) -> Tensor:
        m = state["m"].mul_(self.momentum).add_(g)
        out = newton_schulz(torch.add(g, m, alpha=self.momentum), self.ns_steps)
        return out.mul_(-lr * 0.2 * math.sqrt(max(g.shape)))


def inner_of(name: str, states: Codec = "fp32", eps_outside: bool = False) -> Inner:
    """The inner rule of a name.

    Raises:
        SkimpError: no such rule, or coded states of another rule than adam.
    """
    if name == "adam":
        return Adam(states, eps_outside)
    rules: dict[str, Inner] = {"lion": Sign(), "adafactor": Factored(), "muon": Orthogonal()}
    if name not in rules:
        raise SkimpError("an inner rule", repr(name), instead=", ".join(NAMES))
    if states != "fp32":
        raise SkimpError(
            f"inner rule '{name}' with {states} states",
            "codes of Adam's moments",
            "its states are kept as computed",
            ("states: fp32", "inner: adam"),
        )
    return rules[name]
