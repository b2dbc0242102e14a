"""Natural GaLore's transform: the projected gradient times the inverse empirical Fisher of the last s of its kind.

Das, "Natural GaLore", 2024, arXiv 2410.16029, section 3: F = λ·1 + H·Hᵀ with the last s projected gradients as the
columns of H, the present one among them, and ĝ = F⁻¹·g, by an (s, s) system (`core.linalg.fisher_solve`). λ is
relative, δ·tr(HᵀH)/filled: absolute (the released 1e-3) it rules alone where gradients are small and vanishes where
they are large. The history is emptied when the basis changes: the released code mixes vectors of two bases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.linalg import fisher_solve
from skimp.optim.stages import Place
from skimp.optim.state import Spec


@dataclass(frozen=True)
class Fisher:
    """ĝ = (λ·1 + H·Hᵀ)⁻¹·g. Its length is about 1/(λ + ‖g‖²) times g's, and Adam's to set.

    Attributes:
        history: s.
        damping: δ, relative; or λ itself where `absolute`.
    """

    history: int = 20
    damping: float = 1e-3
    absolute: bool = False
    numbers: ClassVar[tuple[str, ...]] = ("filled", "slot")

    def spec(self, small: tuple[int, int], dtype: torch.dtype) -> Spec:
        s = self.history
        return {"history": ((s, small[0] * small[1]), dtype), "gram": ((s, s), torch.float64)}

    def __call__(self, r: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        history, gram, slot = state["history"], state["gram"], state["slot"]
        history[slot].copy_(r.reshape(-1))
        # One new row and column of the Gram, in float64 from the numbers as they are stored.
        products = torch.mv(history.double(), history[slot].double())
        gram[slot].copy_(products)
        gram[:, slot].copy_(products)
        state["filled"] = min(state["filled"] + 1, self.history)
        state["slot"] = (slot + 1) % self.history
        damping: float | Tensor = self.damping
        if not self.absolute:
            damping = (gram.diagonal().sum() * (self.damping / state["filled"])).clamp_min(1e-30)
        return fisher_solve(history, gram, slot, damping).view(r.shape)

    def reset(self, state: dict[str, Any]) -> None:
        state["history"].zero_()
        state["gram"].zero_()
        state["filled"] = state["slot"] = 0
