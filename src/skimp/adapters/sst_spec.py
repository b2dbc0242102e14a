"""How spectra train, in plain values; and moments that begin anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from skimp.adapters.spec import ALL_LINEAR


@dataclass(frozen=True)
class SSTSpec:
    """How the spectra train.

    Attributes:
        r: vectors of each layer that train at a time. targets: as LoRA's, all linear layers but the head.
        every: optimizer steps of a draw. warmup: steps over which the rate climbs back after one.
        mix: share of the uniform part of the draw's probabilities.
        draws: draws of a round, 0 for k / r rounded up, k the largest of the model's layers.
        seed: of the draws.
        enhanced, unit: leave sigma out of the vectors' gradients; bring vectors back to length 1. False is for
            comparisons.
    """

    r: int = 64
    targets: str | tuple[str, ...] = ALL_LINEAR
    every: int = 200
    warmup: int = 20
    mix: float = 0.5
    draws: int = 0
    seed: int = 0
    enhanced: bool = True
    unit: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return {**asdict(self), "targets": self.targets if isinstance(self.targets, str) else list(self.targets)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SSTSpec:
        """A spec as a checkpoint keeps it."""
        targets = values["targets"]
        return cls(**{**values, "targets": targets if isinstance(targets, str) else tuple(targets)})


def begin_anew(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Moments of these at 0 and their step counts too, in a rule of skimp's or of torch's."""
    reset = getattr(optimizer, "reset_moments", None)
    if reset is not None:
        reset(parameters)
        return
    for p in parameters:
        optimizer.state.pop(p, None)
