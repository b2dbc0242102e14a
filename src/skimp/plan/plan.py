"""A plan: what was chosen for which budget and why, as data that prints, travels as JSON and is stored with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skimp.core.exact import ExactChoices
from skimp.core.memory.trace import Reservation
from skimp.plan.places import Places
from skimp.plan.profile import MemoryProfile


@dataclass(frozen=True)
class Alternative:
    """Another way: a label, its peak, its seconds, whether it fits and whether it leaves the mathematics alone."""

    label: str
    peak_bytes: int
    seconds: float
    fits: bool
    exact: bool
    overrides: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "peak_bytes": self.peak_bytes,
            "seconds": self.seconds,
            "fits": self.fits,
            "exact": self.exact,
            "overrides": list(self.overrides),
        }


@dataclass(frozen=True)
class Plan:
    """The outcome of a search.

    Attributes:
        fits: the chosen run fits every place.
        exact: the chosen exact techniques (the smallest run when nothing fits).
        profile: its simulation.
        places: budgets.
        peak_bytes: what is compared with the budget: the process's resident peak on a CPU, reserved bytes on a card.
        seconds: predicted seconds of one optimizer step.
        why: reasons, one sentence with bytes each.
        alternatives: other exact ways, then approximate offers.
        disk_bytes: on disk at most: checkpoints, the text as tokens, and what is offloaded there.
        host_bytes: of the process in main memory at most; beside a card, what is offloaded to it included.
        reservation: on a card, the allocator's peaks.
        notes: what the reader should know (dropout set to 0, packing simulated as …).
        frontier, decisions: memory against time over the whole lattice, and each decision against its other values,
            where they were asked for (`plan.frontier`).
        arena: one step's tensors at fixed addresses, where that was asked for (`plan.arena`).
    """

    fits: bool
    exact: ExactChoices
    profile: MemoryProfile
    places: Places
    peak_bytes: int
    seconds: float
    why: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    disk_bytes: int
    model: str
    blocks: int
    rows: int
    notes: tuple[str, ...] = ()
    rates: str = ""
    tokens: int = 0
    host_bytes: int = 0
    reservation: Reservation | None = None
    frontier: tuple[Any, ...] = ()
    decisions: tuple[Any, ...] = ()
    arena: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON of `skimp plan --json`."""
        shares = dict(self.profile.peak.by_category)
        device: dict[str, Any] = {
            "name": self.places.device,
            "budget_bytes": self.places.device_budget,
            "peak_bytes": self.peak_bytes,
            "tracked_bytes": self.profile.peak_bytes,
        }
        if self.places.on_cpu:
            shares["baseline"] = self.places.baseline
            shares["allocator"] = self.peak_bytes - self.places.baseline - self.profile.peak.total
        else:
            shares["allocator"] = self.peak_bytes - self.profile.peak.total
        if self.reservation is not None:
            device["allocator"] = self.reservation.as_dict()
        return {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "by_category": shares,
            "where": self.profile.peak.where(),
            "phases": dict(self.profile.phases),
            "chosen": self.exact.as_dict(),
            "why": list(self.why),
            "alternatives": [a.as_dict() for a in self.alternatives],
            "places": {
                "device": device,
                "host": {
                    "budget_bytes": self.places.host,
                    "baseline_bytes": self.places.baseline,
                    "peak_bytes": self.host_bytes,
                },
                "disk": {"budget_bytes": self.places.disk, "peak_bytes": self.disk_bytes},
            },
            "predicted_step_seconds": self.seconds,
            "parameters": self.profile.parameters,
            "trained": self.profile.trained,
            "moments": self.profile.moments(),
            "model": self.model,
            "notes": list(self.notes),
            "seen": self.places.seen.as_dict(),
            "frontier": [point.as_dict() for point in self.frontier],
            "decisions": [decision.as_dict() for decision in self.decisions],
            "arena": None if self.arena is None else dict(self.arena),
        }
