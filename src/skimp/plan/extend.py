"""Extend a simulation of a few blocks to all of them, for any number of recomputed ones.

At a fixed moment of the step (say: the backward of the last kept block) live bytes are a sum over what exists then,
and each block contributes its kept activations, or its input, or its gradients: so they are *affine* in the number
of kept and of recomputed blocks. The moments that can be the peak are the first and last block of each kind in
each phase, and everything outside the blocks. Three small simulations fix each moment's plane; the peak of the
whole model is the largest of the planes. Seconds are affine too. `tests/plan` holds this against full simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from skimp.plan.profile import MemoryProfile

Place = tuple[str, str]
#: A place with its block named by kind and rank: ("backward", "kept last").
Moment = tuple[str, str]
Value = TypeVar("Value")
#: (kept, recomputed) blocks of the three simulations: the corners of a plane. A single block of a kind is its first
#: and its last. In this order a change that concerns recomputed blocks needs the first two, one outside the blocks the
#: first.
CORNERS = ((1, 1), (1, 2), (2, 1))
#: The phase of the moments at which a module's forward begins.
BEGUN = "beginning of forward"


@dataclass(frozen=True)
class Plane:
    """value(kept, recomputed) = base + per_kept * kept + per_recomputed * recomputed."""

    base: float
    per_kept: float
    per_recomputed: float

    def at(self, kept: int, recomputed: int) -> float:
        return self.base + self.per_kept * kept + self.per_recomputed * recomputed


@dataclass(frozen=True)
class Corners:
    """Bytes at every moment, those when a block's forward begins among them, and seconds, of the three small
    simulations of one lattice row."""

    moments: tuple[Mapping[Moment, int], ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, profiles: Sequence[MemoryProfile]) -> Corners:
        """From profiles at `CORNERS`, or at the first of them."""
        found = []
        for profile, at in zip(profiles, CORNERS, strict=False):
            begun = {(BEGUN, owner): size for (phase, owner), size in profile.starts.items() if phase == "forward"}
            found.append(moments({**profile.places, **begun}, *at, size=int))
        return cls(tuple(found), tuple(p.seconds for p in profiles))

    def completed(self, root: Corners) -> Corners:
        """All three corners, where what was not simulated changes from the first corner on as the root does."""
        have = len(self.moments)
        rest = range(have, len(CORNERS))
        first, old = self.moments[0], root.moments
        more = tuple(
            {m: first[m] + old[c][m] - old[0][m] for m in set(first) & set(old[c]) & set(old[0])} for c in rest
        )
        seconds = tuple(self.seconds[0] + root.seconds[c] - root.seconds[0] for c in rest)
        return Corners(self.moments + more, self.seconds + seconds)

    def plus(self, root: Corners, other: Corners) -> Corners:
        """This row with another change of the same root as well: bytes and seconds of independent choices add up."""
        three = zip(self.moments, root.moments, other.moments, strict=True)
        added = tuple({m: a[m] + c[m] - b[m] for m in set(a) & set(b) & set(c)} for a, b, c in three)
        times = zip(self.seconds, root.seconds, other.seconds, strict=True)
        return Corners(added, tuple(a + c - b for a, b, c in times))

    def same_blocks(self, other: Corners) -> bool:
        """Whether no moment of a block differs in the first corner: what changed lies outside the blocks."""
        mine, theirs = self.moments[0], other.moments[0]
        inside = {m for m in {*mine, *theirs} if m[1].startswith(("kept", "recomputed"))}
        return all(mine.get(m) == theirs.get(m) for m in inside)

    def extension(self) -> Extension:
        """The planes through them."""
        shared = set.intersection(*(set(m) for m in self.moments))
        planes = {moment: plane([m[moment] for m in self.moments]) for moment in shared}
        return Extension(planes, plane(self.seconds))


@dataclass(frozen=True)
class Extension:
    """Planes of every moment of one lattice row (fixed micro-batch, chunk and delivery), and of the seconds."""

    moments: Mapping[Moment, Plane]
    seconds: Plane

    def peak(self, kept: int, recomputed: int) -> int:
        """Peak bytes of a model with so many blocks of each kind."""
        there = (p.at(kept, recomputed) for m, p in self.moments.items() if not absent(m, kept, recomputed))
        return round(max(there))

    def fewest_recomputed(self, blocks: int, budget: int) -> int | None:
        """The smallest number of recomputed blocks that fits, or None when even all of them do not."""
        return next((n for n in range(blocks + 1) if self.peak(blocks - n, n) <= budget), None)


def extend(simulate: Callable[[int, int], MemoryProfile]) -> Extension:
    """Run the three small simulations and fit the planes.

    Args:
        simulate: (blocks, how many of them, the first ones, recomputed) -> profile.
    """
    profiles = [simulate(kept + recomputed, recomputed) for kept, recomputed in CORNERS]
    return Corners.of(profiles).extension()


def extend_line(one: MemoryProfile, two: MemoryProfile, more: int) -> int:
    """Peak of 1 + `more` recomputed blocks, from simulations of one and of two (nothing kept)."""
    first, second = moments(one.places, 0, 1, size=int), moments(two.places, 0, 2, size=int)
    return max(first[m] + more * (second[m] - first[m]) for m in set(first) & set(second))


def plane(values: Sequence[float]) -> Plane:
    """Through the three corners."""
    per_recomputed, per_kept = values[1] - values[0], values[2] - values[0]
    return Plane(values[0] - per_kept - per_recomputed, per_kept, per_recomputed)


def absent(moment: Moment, kept: int, recomputed: int) -> bool:
    """Whether a moment belongs to blocks of a kind that the model has none of."""
    owner = moment[1]
    return (owner.startswith("kept") and kept == 0) or (owner.startswith("recomputed") and recomputed == 0)


def moments(
    places: Mapping[Place, Value], kept: int, recomputed: int, *, size: Callable[[Value], int]
) -> dict[Moment, Value]:
    """The values at their places by moment; of several the one with the largest `size`.

    Blocks are named by their rank within their kind so that models of any depth line up.

    Parameters updated in backward are grouped under their block's last known address by the caller's owner names:
    "model.layers.3.mlp.down_proj.weight" counts for block 3.
    """
    found: dict[Moment, Value] = {}
    for (phase, owner), value in places.items():
        index = block_of(owner)
        if index is None:
            names = [owner]
        elif index < recomputed:
            names = _ranks("recomputed", index, recomputed)
        else:
            names = _ranks("kept", index - recomputed, kept)
        for name in names:
            old = found.get((phase, name))
            if old is None or size(value) > size(old):
                found[phase, name] = value
    return found


def _ranks(kind: str, index: int, count: int) -> list[str]:
    return [f"{kind} {rank}" for rank, at in (("first", 0), ("last", count - 1)) if index == at]


def block_of(owner: str) -> int | None:
    """The block index in an owner's name, or None for what is outside the blocks."""
    if owner.startswith("block "):
        return int(owner[6:])
    return next((int(part) for part in owner.split(".") if part.isdigit()), None)
