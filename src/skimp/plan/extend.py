"""Extend a simulation of a few blocks to all of them, for any number of recomputed ones.

At a fixed moment of the step (say: the backward of the last kept block) live bytes are a sum over what exists then,
and each block contributes its kept activations, or its input, or its gradients: so they are *affine* in the number
of kept and of recomputed blocks. The moments that can be the peak are the first and last block of each kind in
each phase, and everything outside the blocks. Three small simulations fix each moment's plane; the peak of the
whole model is the largest of the planes. Seconds are affine too. `tests/plan` holds this against full simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skimp.plan.profile import MemoryProfile

Place = tuple[str, str]
#: (kept, recomputed) blocks of the three simulations: the corners of a plane. A single block of a kind is its first
#: and its last.
CORNERS = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True)
class Plane:
    """value(kept, recomputed) = base + per_kept * kept + per_recomputed * recomputed."""

    base: float
    per_kept: float
    per_recomputed: float

    def at(self, kept: int, recomputed: int) -> float:
        return self.base + self.per_kept * kept + self.per_recomputed * recomputed


@dataclass(frozen=True)
class Extension:
    """Planes of every moment of one lattice row (fixed micro-batch, chunk and delivery), and of the seconds."""

    moments: Mapping[Place, Plane]
    seconds: Plane

    def peak(self, kept: int, recomputed: int) -> int:
        """Peak bytes of a model with so many blocks of each kind."""
        there = (
            plane.at(kept, recomputed)
            for (_, owner), plane in self.moments.items()
            if not (owner.startswith("kept") and kept == 0) and not (owner.startswith("recomputed") and recomputed == 0)
        )
        return round(max(there))

    def fewest_recomputed(self, blocks: int, budget: int) -> int | None:
        """The smallest number of recomputed blocks that fits, or None when even all of them do not."""
        if self.peak(0, blocks) > budget:
            return None
        return next(n for n in range(blocks + 1) if self.peak(blocks - n, n) <= budget)


def extend(simulate: Callable[[int, int], MemoryProfile]) -> Extension:
    """Run the three small simulations and fit the planes.

    Args:
        simulate: (blocks, how many of them, the first ones, recomputed) -> profile.
    """
    found = []
    for kept, recomputed in CORNERS:
        profile = simulate(kept + recomputed, recomputed)
        found.append((_moments(profile.places, kept, recomputed), profile))
    shared = set(found[0][0]) & set(found[1][0]) & set(found[2][0])
    moments = {place: _plane([m[place] for m, _ in found]) for place in shared}
    return Extension(
        moments,
        _plane([p.seconds for _, p in found]),
    )


def extend_line(one: MemoryProfile, two: MemoryProfile, more: int) -> int:
    """Peak of 1 + `more` recomputed blocks, from simulations of one and of two (nothing kept)."""
    first, second = _moments(one.places, 0, 1), _moments(two.places, 0, 2)
    return max(first[m] + more * (second[m] - first[m]) for m in set(first) & set(second))


def _plane(values: list[float]) -> Plane:
    """Through the three corners."""
    per_kept, per_recomputed = values[1] - values[0], values[2] - values[0]
    return Plane(values[0] - per_kept - per_recomputed, per_kept, per_recomputed)


def _moments(places: Mapping[Place, int], kept: int, recomputed: int) -> dict[Place, int]:
    """Peaks by moment, blocks named by their rank within their kind so that models of any depth line up.

    Parameters updated in backward are grouped under their block's last known address by the caller's owner names:
    "model.layers.3.mlp.down_proj.weight" counts for block 3.
    """
    moments: dict[Place, int] = {}
    for (phase, owner), value in places.items():
        index = _block(owner)
        if index is None:
            names = [owner]
        elif index < recomputed:
            names = _ranks("recomputed", index, recomputed)
        else:
            names = _ranks("kept", index - recomputed, kept)
        for name in names:
            moments[phase, name] = max(value, moments.get((phase, name), 0))
    return moments


def _ranks(kind: str, index: int, count: int) -> list[str]:
    return [f"{kind} {rank}" for rank, at in (("first", 0), ("last", count - 1)) if index == at]


def _block(owner: str) -> int | None:
    """The block index in an owner's name, or None for what is outside the blocks."""
    if owner.startswith("block "):
        return int(owner[6:])
    return next((int(part) for part in owner.split(".") if part.isdigit()), None)
