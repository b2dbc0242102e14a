"""What an adapter is, in plain values: what a recipe, a PEFT folder and a call from Python all come down to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from skimp.adapters.family_facts import INITS, KEPT, PRESETS, REPARAMS
from skimp.core.errors import SkimpError

ALL_LINEAR = "all-linear"
Scale = Literal["standard", "rslora"]


@dataclass(frozen=True)
class Spec:
    """A LoRA adapter.

    Attributes:
        r: rank. alpha: numerator of the scale.
        scale: "standard" is alpha / r; "rslora" is alpha / sqrt(r) (arXiv 2312.03732, theorem 3.2): with it the size of
            activations and gradients does not depend on r.
        targets: "all-linear", names (a module matches that has this name or ends with it after a dot), or one regular
            expression that must match a whole module name.
        dropout: probability with which an input number of the addition is set to 0.
        embeddings, head: train these in full.
        init: how A and B begin, see `initial`.
        reparam: "plain" is W + s B A; "dora" gives each of its rows a trained norm, without a gradient through the
            row's own; "weightnorm" with it (`norms`).
        ratio: rate of B and of the norms over that of A (LoRA+, arXiv 2402.12354, section 4).
        steps: of init "loftq": turns of coding and decomposing (`loftq`).
        seed: address of A's numbers and of the dropout masks.
        ranks: module name -> (r, alpha) where it differs from the above.
        name: what a recipe calls it.
    """

    r: int = 16
    alpha: float = 32.0
    scale: Scale = "standard"
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    embeddings: bool = False
    head: bool = False
    init: str = "kaiming"
    seed: int = 0
    ranks: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    reparam: Literal["plain", "dora", "weightnorm"] = "plain"
    ratio: float = 1.0
    name: str = "lora"
    steps: int = 5

    def __post_init__(self) -> None:
        wrong = [
            f"{what} {found}"
            for what, found, good in (
                ("r", self.r, self.r >= 1),
                ("alpha", self.alpha, math.isfinite(self.alpha) and self.alpha > 0),
                ("scale", self.scale, self.scale in ("standard", "rslora")),
                ("dropout", self.dropout, 0.0 <= self.dropout < 1.0),
                ("init", self.init, self.init in INITS),
                ("reparam", self.reparam, self.reparam in REPARAMS),
                ("steps", self.steps, self.steps >= 0),
                ("ratio", self.ratio, math.isfinite(self.ratio) and self.ratio > 0),
            )
            if not good
        ]
        if wrong:
            raise SkimpError("a LoRA adapter", ", ".join(wrong), "out of range", "r=16, alpha=32, dropout=0.0")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {**asdict(self), "targets": targets, "ranks": {name: list(pair) for name, pair in self.ranks.items()}}

    @classmethod
    def from_recipe(cls, asked: Mapping[str, Any], seed: int) -> Spec:
        """From every key of a recipe's `adapter:`; what the method's name says is not among them."""
        known = {f.name for f in fields(cls)} - {"seed"}
        values = {**PRESETS[asked["name"]], **{key: value for key, value in asked.items() if key in known}}
        return cls(seed=seed, **values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spec:
        """A spec as a checkpoint keeps it."""
        targets = values["targets"]
        ranks = {name: (int(r), float(alpha)) for name, (r, alpha) in values["ranks"].items()}
        return cls(**{**values, "targets": targets if isinstance(targets, str) else tuple(targets), "ranks": ranks})

    @property
    def keeps_start(self) -> bool:
        """Whether what A and B began with is kept beside them."""
        return self.init in KEPT and (self.init != "loftq" or self.steps > 0)

    def rank_of(self, name: str) -> int:
        """The rank of one module's addition."""
        return self.ranks[name][0] if name in self.ranks else self.r

    def alpha_of(self, name: str) -> float:
        return self.ranks[name][1] if name in self.ranks else self.alpha

    def factor(self, name: str) -> float:
        """s in y = W x + s B A x for one module."""
        r, alpha = self.rank_of(name), self.alpha_of(name)
        return alpha / math.sqrt(r) if self.scale == "rslora" else alpha / r
