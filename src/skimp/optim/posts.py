"""What is added to a weight where that is more than a lifted move: scaled raw gradients, residuals, and their limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from skimp.optim.stages import Place, Projector
from skimp.optim.state import Spec

#: Added to norms that are divided by.
TINY = 1e-8


def limited(direction: Tensor, state: dict[str, Any], growth: float) -> Tensor:
    """`direction` in place, its norm at most `growth` times the last one's (Fira, arXiv 2410.01623, section 4.3).

    L = max(‖D‖ / (‖last‖ + 1e-8), γ) / γ and D ← D / L. The last norm is a tensor of the state ("norm"): nothing is
    read. At the first direction that is not zero it is that one's; a direction of zeros leaves it alone, since from a
    norm of 0 it would take 1,387 steps of 1 % to come back to 1.
    """
    norm, last = torch.linalg.vector_norm(direction), state["norm"]
    ratio = torch.where(last == 0, torch.ones_like(norm), norm / (last + TINY))
    limit = ratio.clamp_min(growth) / growth
    direction.div_(limit)
    last.copy_(torch.where(norm == 0, last, norm / limit))
    return direction


def column_factor(r: Tensor, psi: Tensor) -> Tensor:
    """(1, b): ‖ψⱼ‖ / (‖Rⱼ‖ + 1e-8) of every column, what the inner rule made of its length."""
    factor: Tensor = torch.linalg.vector_norm(psi, dim=0, keepdim=True)
    return factor.div_(torch.linalg.vector_norm(r, dim=0, keepdim=True).add_(TINY))


@dataclass(frozen=True)
class ScaleRaw:
    """APOLLO (Zhu et al., 2024, arXiv 2412.05270, algorithm 1): the raw gradient, scaled as Adam scaled its projection.

    Attributes:
        by: "channel", a factor for every column of the longer side, or "tensor", one for all (Mini).
        growth: the limit; `early` applies √scale before it and not after.
    """

    by: Literal["channel", "tensor"] = "channel"
    growth: float = 1.01
    early: bool = False

    def spec(self, a: int, b: int) -> Spec:
        return {"norm": ((), torch.float32)}

    def delta(
        self, g: Tensor, r: Tensor, psi: Tensor, projector: Projector, state: dict[str, Any], place: Place
    ) -> Tensor:
        if self.by == "channel":
            direction = g * column_factor(r, psi)
        else:
            direction = g * (torch.linalg.vector_norm(psi) / (torch.linalg.vector_norm(r) + TINY))
        root = float(place.group["scale"]) ** 0.5
        if self.early:
            return limited(direction.mul_(root), state, self.growth)
        return limited(direction, state, self.growth).mul_(root)


@dataclass(frozen=True)
class Residual:
    """Fira (Chen et al., 2024, arXiv 2410.01623, algorithm 1): the lifted move and what was projected away, scaled.

    D = α·P·ψ + limited((G − P·R) · ‖ψⱼ‖/‖Rⱼ‖). The released code subtracts α·P·R instead, so that 1 − α of the raw
    gradient in the subspace stays in the residual: `as_released`.
    """

    growth: float = 1.01
    as_released: bool = False

    def spec(self, a: int, b: int) -> Spec:
        return {"norm": ((), torch.float32)}

    def delta(
        self, g: Tensor, r: Tensor, psi: Tensor, projector: Projector, state: dict[str, Any], place: Place
    ) -> Tensor:
        scale = float(place.group["scale"])
        rest = g - projector.lift(r, state, place).mul_(scale if self.as_released else 1.0)
        limited(rest.mul_(column_factor(r, psi)), state, self.growth)
        return rest.add_(projector.lift(psi, state, place), alpha=scale)


@dataclass(frozen=True)
class SignRest:
    """FRUGAL (Zmushko et al., 2024, arXiv 2411.07837, algorithm 1): signs for what the state-full part leaves out."""

    factor: float = 1.0

    def spec(self, a: int, b: int) -> Spec:
        return {}

    def delta(
        self, g: Tensor, r: Tensor, psi: Tensor, projector: Projector, state: dict[str, Any], place: Place
    ) -> Tensor:
        rest = (g - projector.lift(r, state, place)).sign_().mul_(self.factor)
        return rest.add_(projector.lift(psi, state, place)).mul_(float(place.group["scale"]))
