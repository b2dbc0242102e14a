"""Dense bases: P (a × r) with R = Pᵀ·G, made by one of `core.linalg`'s ways and kept in one of two formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.codecs.affine import Affine
from skimp.core.linalg import exact_basis, random_basis, warm_basis
from skimp.core.noise import normal
from skimp.optim.stages import Place
from skimp.optim.state import Spec


@dataclass(frozen=True)
class Subspace:
    """The leading left singular vectors of G.

    Attributes:
        method: "exact", or "random": a randomised SVD the first time and, if `warm`, power iterations from the last
            basis afterwards.
        power: power iterations of a refresh.
        oversample: further columns of a sketch, as a part of the rank; at least 8 columns.
        bits: 0 keeps P in the dtype of the arithmetic; 8 or 4 code it in groups of 256 (Q-GaLore).
    """

    method: Literal["exact", "random"] = "exact"
    warm: bool = True
    power: int = 1
    oversample: float = 0.125
    bits: int = 0
    saves: ClassVar[bool] = True
    numbers: ClassVar[tuple[str, ...]] = ()

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        if self.bits:
            return {f"P_{k}": v for k, v in Affine(self.bits).spec((a, rank)).items()}
        return {"P": ((a, rank), dtype)}

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        return rank, b

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        where: dict[str, Any] = {"seed": place.seed, "name": place.name, "stream": place.step}
        if self.method == "exact":
            new = exact_basis(g, place.rank)
        elif self.warm and state["refreshed"]:
            new = warm_basis(g, self.basis(state, place), power=self.power, **where)
        else:
            extra = max(8, int(self.oversample * place.rank))
            new = random_basis(g, place.rank, oversample=extra, power=self.power, **where)
        self.keep(new, state)

    def keep(self, basis: Tensor, state: dict[str, Any]) -> None:
        """Write a basis into the state."""
        if not self.bits:
            state["P"].copy_(basis)
            return
        for key, value in Affine(self.bits).encode(basis).items():
            state[f"P_{key}"].copy_(value)

    def basis(self, state: dict[str, Any], place: Place) -> Tensor:
        if not self.bits:
            held: Tensor = state["P"]
            return held
        parts = {key: state[f"P_{key}"] for key in ("codes", "scale", "zero")}
        return Affine(self.bits).decode(parts, (place.rows, place.rank), torch.float32)

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(self.basis(state, place).t(), g)

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(torch.mm(left, self.basis(state, place)).t(), right)

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        w.addmm_(self.basis(state, place), n, beta=decay)

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(self.basis(state, place), n)


@dataclass(frozen=True)
class Gaussian:
    """P with entries N(0, 1/r), addressed by (seed, name, period): not stored, but drawn again each time."""

    saves: ClassVar[bool] = True
    numbers: ClassVar[tuple[str, ...]] = ()

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        return {}

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        return rank, b

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        """The period's number is in the state already."""

    def drawn(self, state: Mapping[str, Any], place: Place, like: Tensor) -> Tensor:
        """(a, r) P of the present period, in the dtype and on the device of `like`."""
        count, stream = place.rows * place.rank, state["refreshed"]
        numbers = normal(place.seed, f"{place.name}.P", 0, count, stream=stream, device=like.device)
        return numbers.view(place.rows, place.rank).mul_(place.rank**-0.5).to(like.dtype)

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(self.drawn(state, place, g).t(), g)

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(torch.mm(left, self.drawn(state, place, left)).t(), right)

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        w.addmm_(self.drawn(state, place, n), n, beta=decay)

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(self.drawn(state, place, n), n)

    def basis(self, state: dict[str, Any], place: Place) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Identity:
    """R = G: the un-projected rule, to compare with."""

    saves: ClassVar[bool] = False
    numbers: ClassVar[tuple[str, ...]] = ()

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        return {}

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        return a, b

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        """There is no basis."""

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return g

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return torch.mm(left.t(), right)

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        w.mul_(decay).add_(n)

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        return n.clone()

    def basis(self, state: dict[str, Any], place: Place) -> Tensor | None:
        return None
