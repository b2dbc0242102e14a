"""LDAdam's basis: new at every step, by one power iteration from the last one on what momentum and gradient say.

Robert et al., "LDAdam", 2024, arXiv 2410.16103, algorithm 1: with b = ρ·P_old·M/(1 − β₁ᵗ⁻¹) + (1 − ρ)·G the basis is
the orthonormal factor of b·(bᵀ·P_old). Moments are carried over (`policy.rotate`) and everything the projection or the
change of basis leaves out goes into the next gradient (`Stages.feedback`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skimp.core.linalg import orthonormal
from skimp.optim.bases import Subspace
from skimp.optim.stages import Place


@dataclass(frozen=True)
class Interpolated(Subspace):
    """Attributes:
    rho: the momentum's share of what the basis is fitted to.
    """

    rho: float = 0.908

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        if not state["refreshed"]:
            super().refresh(g, state, place)
            return
        old, beta1 = state["P"], place.group["betas"][0]
        mixed = torch.mm(old, state["m"].to(g.dtype) * (self.rho / (1.0 - beta1 ** max(1, state["since"]))))
        mixed.add_(g, alpha=1.0 - self.rho)
        self.keep(orthonormal(torch.mm(mixed, torch.mm(mixed.t(), old))), state)
