"""A basis that is trained: one step of online PCA after every step of the weights (Online Subspace Descent).

Liang et al., "Memory-Efficient LLM Training with Online Subspace Descent", 2024, arXiv 2408.12857, section 3. P
follows the gradient of ‖P·Pᵀ·Ĝ − Ĝ‖² + λ·‖PᵀP − 1‖² with Ĝ = G/‖G‖, by Adam. With A = Pᵀ·Ĝ and B = Ĝ·Aᵀ that
gradient is 2·(P·(A·Aᵀ) + B·(PᵀP) − 2·B) + 4·λ·P·(PᵀP − 1): one product with G beside small ones, and the residual,
as large as G, is never formed. The paper's λ is 0 in the released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.read import read
from skimp.optim.bases import Subspace
from skimp.optim.inner import Adam
from skimp.optim.options import lr_of
from skimp.optim.stages import Place
from skimp.optim.state import Spec


@dataclass(frozen=True)
class OnlinePCA(Subspace):
    """Begins at a randomised SVD of the first gradient; afterwards only `advance` changes it.

    Attributes:
        rate: learning rate of P at the peak of the schedule; it follows lr / peak, the group's "peak_lr". 1/200 is
            the released default.
        ortho: λ.
    """

    method: Literal["exact", "random"] = "random"
    numbers: ClassVar[tuple[str, ...]] = ("learned",)
    rate: float = 0.005
    ortho: float = 0.1

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        return {"P": ((a, rank), dtype), "P_m": ((a, rank), dtype), "P_v": ((a, rank), dtype)}

    def advance(self, g: Tensor, r: Tensor, state: dict[str, Any], place: Place) -> None:
        """One Adam step of P, after the lift. A gradient of zeros moves nothing, not even by momentum."""
        size = torch.linalg.vector_norm(g)
        if read(size, expect=1.0) == 0.0:
            return
        state["learned"] += 1
        peak = float(place.group["peak_lr"])
        rate = self.rate * (lr_of(place.group) / peak if peak else 1.0)
        slope = pca_gradient(state["P"], g, r, size, self.ortho)
        moments = {"m": state["P_m"], "v": state["P_v"]}
        options = {"betas": (0.9, 0.999), "eps": 1e-8}
        state["P"].add_(Adam().move(slope, moments, rate, state["learned"], options, place.name))


def pca_gradient(basis: Tensor, g: Tensor, r: Tensor, size: Tensor, ortho: float) -> Tensor:
    """(a, r) gradient of ‖P·Pᵀ·Ĝ − Ĝ‖² + λ·‖PᵀP − 1‖² at P = `basis`, for Ĝ = g / size and r = Pᵀ·g."""
    small = r / size
    image = torch.mm(g, small.t()).div_(size)
    gram = torch.mm(basis.t(), basis)
    slope = torch.mm(basis, torch.mm(small, small.t())).add_(torch.mm(image, gram)).sub_(image, alpha=2.0).mul_(2.0)
    if ortho:
        gram.diagonal().sub_(1.0)
        slope.addmm_(basis, gram, alpha=4.0 * ortho)
    return slope
