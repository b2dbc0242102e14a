"""What a simulation returns: peaks by category and place, where they are, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skimp.core.exact import ExactChoices
from skimp.core.memory.timeline import Timeline
from skimp.core.memory.tracker import Peak


@dataclass(frozen=True)
class MemoryProfile:
    """Tracked bytes of a run on one device.

    Attributes:
        exact: the choices simulated.
        peak: the fullest moment of training.
        resting: bytes that are always there: weights, optimizer states, buffers.
        phases: peak bytes of each phase (load, train, evaluate, save, resume).
        places: highest bytes at each (phase, owner) of the training step.
        seconds: predicted seconds of one optimizer step.
        flops: arithmetic of one optimizer step.
        parameters: number of parameters, of an adapter too; trained: of those the ones that move.
        kept_bytes: tensors in one checkpoint: weights, or what an adapter trains, and optimizer states.
        shares, operators: bytes by category at each place's highest moment, and the operator then.
        fresh: bytes of results that a step allocates anew.
        starts: highest bytes when each (phase, owner) begins; by_block: seconds of each block in a step.
        timeline: bytes by category over the last simulated step, if asked for.
        measured: what could not be simulated, so that real steps were measured (`plan.unfakeable`); else empty.
        away: bytes held at most in the places that do not compute, by place: what is offloaded.
    """

    exact: ExactChoices
    peak: Peak
    resting: dict[str, int]
    phases: dict[str, int]
    places: Mapping[tuple[str, str], int]
    seconds: float
    flops: int
    parameters: int
    trained: int = 0
    kept_bytes: int = 0
    shares: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict, repr=False)
    operators: Mapping[tuple[str, str], str] = field(default_factory=dict, repr=False)
    timeline: Timeline | None = field(default=None, repr=False)
    away: Mapping[str, int] = field(default_factory=dict)
    fresh: int = 0
    measured: str = ""
    starts: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    by_block: Mapping[int, float] = field(default_factory=dict, repr=False)

    @property
    def peak_bytes(self) -> int:
        """The largest of all phases: what the device must hold."""
        return max(self.phases.values())

    @property
    def working_bytes(self) -> int:
        """The largest of the phases that take turns once a run is under way: what blocks may wait up to.

        Loading and resuming come once, and blocks that waited up to their peak from then on would be bytes that a run
        does not need (GPT-2: 46 MB).
        """
        return max(size for phase, size in self.phases.items() if phase not in ("load", "choose", "resume"))

    def moments(self) -> dict[str, dict[str, int]]:
        """Highest bytes by phase and place within it, for drawing over a measured step.

        The optimizer's parameters are one place: there are hundreds, and their moments differ by one gradient.
        """
        found: dict[str, dict[str, int]] = {}
        for (phase, owner), size in self.places.items():
            inside = found.setdefault(phase, {})
            name = "" if phase == "optimizer" else owner
            inside[name] = max(inside.get(name, 0), size)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "exact": self.exact.as_dict(),
            "peak_bytes": self.peak_bytes,
            "by_category": dict(self.peak.by_category),
            "where": self.peak.where(),
            "phases": dict(self.phases),
            "away": dict(self.away),
            "seconds": self.seconds,
            "flops": self.flops,
            "parameters": self.parameters,
            "trained": self.trained,
        }
