"""Both sides projected: R = Pᵀ·G·Q, r × r. Less state than one side from r of a tenth of the matrix on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skimp.optim.bases import Subspace
from skimp.optim.stages import Place
from skimp.optim.state import Spec


@dataclass(frozen=True)
class TwoSided(Subspace):
    """Left and right singular vectors: (a + b)·r numbers of bases, r² of everything else."""

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        return {"P": ((a, rank), dtype), "Q": ((b, rank), dtype)}

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        return rank, rank

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        super().refresh(g, state, place)
        # Singular vectors of the other side, in the same order: Gᵀ·pⱼ is σⱼ·qⱼ.
        images = torch.mm(g.t(), state["P"])
        state["Q"].copy_(images / torch.linalg.vector_norm(images, dim=0).clamp_min(1e-30))

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(torch.mm(state["P"].t(), g), state["Q"])

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(torch.mm(left, state["P"]).t(), torch.mm(right, state["Q"]))

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        w.addmm_(torch.mm(state["P"], n), state["Q"].t(), beta=decay)

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(torch.mm(state["P"], n), state["Q"].t())
