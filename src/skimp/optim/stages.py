"""The slots of a projected optimizer, and what is passed between them.

    gradient G (a × b) → projector → R → transforms → inner rule → N → post, or the plain lift → weight

a is the shorter side: a matrix with more rows than columns is seen transposed, so that every stage is written once.
A stage says what state it keeps (`spec`) and works on the plain tensors of one parameter's state, by its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from skimp.optim.inner import Adam, Codec, Inner
from skimp.optim.state import Spec

#: What becomes of the moments when the basis changes: `keep` reads them in the new basis as they are (GaLore), `align`
#: turns the new basis within its span towards the old one, `rotate` carries the moments over (LDAdam), `reset` begins
#: them anew (Grass, FRUGAL).
Policy = Literal["keep", "align", "rotate", "reset"]


@dataclass(frozen=True)
class Place:
    """Which parameter, when: the address of noise, and the options.

    Attributes:
        name: of the parameter.
        step: of the parameter, from 1.
        rank: of its basis. rows, columns: a and b.
        group: the options of its group.
    """

    name: str
    step: int
    rank: int
    rows: int
    columns: int
    group: Mapping[str, Any]

    @property
    def seed(self) -> int:
        return int(self.group.get("seed", 0))


class Projector(Protocol):
    """A map of G to fewer numbers and back.

    Attributes:
        saves: False for one that is only there to be compared with.
        numbers: Python numbers of the state that are its own.
    """

    saves: ClassVar[bool]
    numbers: ClassVar[tuple[str, ...]]

    def spec(self, a: int, b: int, rank: int, dtype: torch.dtype) -> Spec:
        """State of a basis for an (a, b) gradient, a ≤ b."""
        ...

    def small(self, a: int, b: int, rank: int) -> tuple[int, int]:
        """Shape of R."""
        ...

    def refresh(self, g: Tensor, state: dict[str, Any], place: Place) -> None:
        """A new basis from G (a, b), written into the state."""
        ...

    def project(self, g: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        """R of G."""
        ...

    def project_factors(self, left: Tensor, right: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        """R of leftᵀ·right, (t, a) and (t, b), without forming it."""
        ...

    def add_(self, w: Tensor, n: Tensor, state: dict[str, Any], place: Place, decay: float) -> None:
        """w ← decay · w + lift(n), in place."""
        ...

    def lift(self, n: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        """(a, b), a new tensor."""
        ...

    def basis(self, state: dict[str, Any], place: Place) -> Tensor | None:
        """The (a, r) basis as numbers, for policies that compare two; None where there is none to compare."""
        ...


class Transform(Protocol):
    """What happens to R before the inner rule."""

    numbers: ClassVar[tuple[str, ...]]

    def spec(self, small: tuple[int, int], dtype: torch.dtype) -> Spec: ...

    def __call__(self, r: Tensor, state: dict[str, Any], place: Place) -> Tensor:
        """A new R."""
        ...

    def reset(self, state: dict[str, Any]) -> None:
        """The basis changed: nothing of the old one may be mixed with the new."""
        ...


class Post(Protocol):
    """What is added to the weight where that is more than the lifted move."""

    def spec(self, a: int, b: int) -> Spec: ...

    def delta(
        self, g: Tensor, r: Tensor, psi: Tensor, projector: Projector, state: dict[str, Any], place: Place
    ) -> Tensor:
        """(a, b) direction D, a new tensor; the weight moves by −lr · D.

        Args:
            g: the gradient. r: its projection. psi: the inner rule's direction, at rate 1.
        """
        ...


_ADAM = Adam()


@dataclass(frozen=True)
class Stages:
    """One composition.

    Attributes:
        projector, inner, transforms, post: the slots; without a post the inner rule's move is lifted.
        policy: of the moments at a change of basis.
        feedback: what the projection left out is kept (a·b more numbers) and added to the next gradient (LDAdam).
        states: codec of the moments, also of the parameters that stay whole.
        decay_after: the weight decays after the update and not before it (the released GaLore).
        lazy: the period doubles while successive bases are alike (Q-GaLore).
    """

    projector: Projector
    inner: Inner = _ADAM
    transforms: tuple[Transform, ...] = ()
    post: Post | None = None
    policy: Policy = "keep"
    feedback: bool = False
    states: Codec = "fp32"
    decay_after: bool = False
    lazy: bool = False
