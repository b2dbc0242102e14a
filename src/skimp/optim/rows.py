"""Rows of the gradient instead of mixtures of them: a selection costs an index where a basis costs a matrix.

Muhamed et al., "Grass: Compute Efficient Low-Memory LLM Training with Structured Sparse Gradients", 2024, arXiv
2406.17660, section 3. Pᵀ = ρ·B with B a selection of r rows of the shorter side. Drawn with replacement from q with
ρ = 1/√(r·q), E[P·Pᵀ] = 1, so P·Pᵀ·G is without bias, and q ∝ ‖Gᵢ‖ has the least variance; q ∝ ‖Gᵢ‖² has exactly that
of uniform rows. A row drawn twice moves twice (`index_add_`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.noise import uniform
from skimp.optim.stages import Place
from skimp.optim.state import Spec

How = Literal["top", "norm", "norm2", "uniform"]


@dataclass(frozen=True)
class Rows:
    """r of the a rows of G.

    Attributes:
        how: the largest norms, or drawn in proportion to norms, to their squares, or alike.
        replace: drawn with replacement and scaled to be unbiased; without, ρ = 1.
        decay_rest: rows that are not selected decay too; False leaves them as they are to the bit.
    """

    how: How = "top"
    replace: bool = False
    decay_rest: bool = True
    saves: ClassVar[bool] = True
    few: ClassVar[bool] = True  # without a post only the chosen rows move
    numbers: ClassVar[tuple[str, ...]] = ()

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        return {"chosen": ((rank,), torch.int32), "rho": ((rank,), torch.float32)}

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        return rank, b

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        rank, norms = place.rank, torch.linalg.vector_norm(g, dim=1)
        state["rho"].fill_(1.0)
        if self.how == "top":
            chosen = torch.topk(norms, rank).indices
        else:
            weights = {"norm": norms, "norm2": norms.square(), "uniform": torch.ones_like(norms)}[self.how].double()
            chances = weights / weights.sum()
            drawn = uniform(
                place.seed, f"{place.name}.rows", 0, max(rank, g.shape[0]), stream=place.step, device=g.device
            )
            if self.replace:
                edges = chances.cumsum(0)
                chosen = torch.searchsorted(edges, drawn[:rank].double() * edges[-1]).clamp_max_(g.shape[0] - 1)
                state["rho"].copy_((chances[chosen] * rank).rsqrt())
            else:
                # Gumbel's trick: the r largest of log q + noise are r draws without replacement.
                noise = drawn[: g.shape[0]].double().add_(2.0**-25).log_().neg_().log_().neg_()
                chosen = torch.topk(chances.log() + noise, rank).indices
        state["chosen"].copy_(chosen.sort().values)
        if self.replace and self.how != "top":
            order = chosen.argsort(stable=True)
            state["rho"].copy_(state["rho"][order])

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        rows = g.index_select(0, state["chosen"])
        return rows.mul_(state["rho"].unsqueeze(1)) if self.replace else rows

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return self._rows(torch.mm(left.index_select(1, state["chosen"]).t(), right), state)

    def _rows(self, n: Tensor, state: dict[str, Any]) -> Tensor:
        return n * state["rho"].unsqueeze(1).to(n.dtype) if self.replace else n

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        if decay != 1.0:
            if self.decay_rest:
                w.mul_(decay)
            else:
                touched = torch.zeros(w.shape[0], 1, dtype=w.dtype, device=w.device)
                touched.index_fill_(0, state["chosen"].long(), 1.0)
                w.mul_(1.0 - touched * (1.0 - decay))
        w.index_add_(0, state["chosen"], self._rows(n, state))

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        out = torch.zeros(place.rows, n.shape[1], dtype=n.dtype, device=n.device)
        return out.index_add_(0, state["chosen"], self._rows(n, state))

    def basis(self, state: dict[str, Any], place: Place) -> Tensor | None:
        return None
