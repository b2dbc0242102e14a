"""Which blocks are recomputed and what each of them keeps: solved exactly, for blocks that are alike and for others.

A *ledger* says of every block, at every level (all kept; or run again in backward, keeping something or nothing), what
it leaves behind for backward, what its own fullest moment takes on top of what the blocks before it left, and its
seconds. Then a moment inside block i takes own_i(level of i) + sum of left_j(level of j) over the blocks before it, the
loss head takes what all blocks left, and everything else does not depend on levels. Seconds add up. So the choice is a
knapsack along the chain of blocks, and one number, what was left so far, is all that later blocks need to know of
earlier ones: a dynamic programme over it, with what is dominated in both bytes and seconds left out, is exact. (The
integer programme of the same problem gives the same answers and needs a solver.)

The chain form follows "Rockmate", Zhao et al., ICML 2023, section 3 (blocks with several options, then a dynamic
programme over the chain); the levels are those of Korthikanti et al., 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from skimp.core.exact import Keep, one_word
from skimp.plan.extend import BEGUN, Extension, Plane, block_of
from skimp.plan.profile import MemoryProfile

#: Nothing is made again; else what a recomputed block keeps.
ALL = "all"
#: Times are added as whole picoseconds: sums do not depend on their order, and equal choices stay equal.
TICK = 1e-12


@dataclass(frozen=True)
class Ledger:
    """Bytes and seconds of every block at every level.

    Attributes:
        left: by block and level, bytes that wait for backward after the block's forward.
        own: by block and level, bytes of its fullest moment, less what the blocks before it left.
        ticks: by block and level, picoseconds beyond those of keeping all.
        outside: the fullest moment between forward and backward, less what all blocks left.
        constant: the fullest moment that no level changes.
        seconds: of a step that keeps all.
    """

    left: tuple[Mapping[str, int], ...]
    own: tuple[Mapping[str, int], ...]
    ticks: tuple[Mapping[str, int], ...]
    outside: int
    constant: int
    seconds: float

    def peak(self, levels: Sequence[str]) -> int:
        """Bytes at most with these levels, one a block."""
        before, most = 0, self.constant
        for left, own, level in zip(self.left, self.own, levels, strict=True):
            most = max(most, before + own[level])
            before += left[level]
        return max(most, self.outside + before)

    def time(self, levels: Sequence[str]) -> float:
        """Seconds of a step with these levels."""
        return self.seconds + TICK * sum(ticks[level] for ticks, level in zip(self.ticks, levels, strict=True))

    def solve(self, budget: int, allowed: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
        """The fastest levels whose peak lies within a budget; of equally fast ones those that leave least, with
        earlier blocks recomputed first.

        Args:
            budget: bytes.
            allowed: the levels each block may have.

        Returns:
            A level a block, or None where none fits.
        """
        if self.constant > budget:
            return None
        # (bytes left so far, ticks so far) -> how it was reached; in ascending bytes and descending ticks.
        states: list[tuple[int, int]] = [(0, 0)]
        steps: list[dict[tuple[int, int], tuple[tuple[int, int], str]]] = []
        for left, own, ticks, levels in zip(self.left, self.own, self.ticks, allowed, strict=True):
            options = [(own[level], left[level], ticks[level], level) for level in sorted(levels, key=left.__getitem__)]
            reached: dict[tuple[int, int], tuple[tuple[int, int], str]] = {}
            for state in states:
                before, spent = state
                for inside, more, cost, level in options:
                    if before + inside <= budget:
                        reached.setdefault((before + more, spent + cost), (state, level))
            states, least = [], None
            for state in sorted(reached):
                if least is None or state[1] < least:
                    states.append(state)
                    least = state[1]
            steps.append(reached)
        ends = [state for state in states if state[0] + self.outside <= budget]
        if not ends:
            return None
        state, chosen = ends[-1], list[str]()  # the most bytes, the fewest ticks
        for reached in reversed(steps):
            state, level = reached[state]
            chosen.append(level)
        return tuple(chosen[::-1])


@dataclass(frozen=True)
class Uniform:
    """All blocks at one level: bytes by phase and block, bytes outside the blocks by place, what each block leaves, and
    each block's seconds beyond some that all levels share."""

    inside: Mapping[str, Sequence[int]]
    outside: Mapping[tuple[str, str], int]
    left: Sequence[int]
    seconds: Sequence[float]


def ledger(levels: Mapping[str, Uniform], seconds: float) -> Ledger:
    """From runs whose blocks are all at one level, a run for each level.

    A phase whose bytes no level changes lies outside forward and backward; a place outside the blocks that changes lies
    between the two.

    Args:
        levels: by level; `ALL` among them.
        seconds: of the step that keeps all.
    """
    kept, others = levels[ALL], [found for level, found in levels.items() if level != ALL]
    blocks, constant, outside = range(len(kept.left)), 0, 0
    carrying = []
    for phase in kept.inside:
        if all(found.inside.get(phase) == kept.inside[phase] for found in others):
            constant = max(constant, *kept.inside[phase])
        else:
            carrying.append(phase)
    for place in set().union(*(found.outside for found in levels.values())):
        sizes = [found.outside.get(place, 0) for found in levels.values()]
        if len(set(sizes)) == 1:
            constant = max(constant, sizes[0])
        else:
            outside = max(outside, *(s - sum(f.left) for s, f in zip(sizes, levels.values(), strict=True)))
    own: list[dict[str, int]] = [{} for _ in blocks]
    for level, found in levels.items():
        before = 0
        for i in blocks:
            own[i][level] = max((found.inside[p][i] for p in carrying if p in found.inside), default=0) - before
            before += found.left[i]
    left = tuple({level: int(found.left[i]) for level, found in levels.items()} for i in blocks)
    ticks = tuple(
        {level: round((found.seconds[i] - kept.seconds[i]) / TICK) for level, found in levels.items()} for i in blocks
    )
    return Ledger(left, tuple(own), ticks, outside, constant, seconds)


def stitched(kinds: Sequence[Ledger]) -> Ledger:
    """Of blocks of several kinds: for each block the ledger of a whole model of its kind."""

    def each(rows: str) -> tuple[Mapping[str, int], ...]:
        return tuple(getattr(kind, rows)[i] for i, kind in enumerate(kinds))

    # A step of a model of one kind is that of the kind's own share, in every block, and of what lies outside them.
    seconds = sum(kind.seconds for kind in kinds) / len(kinds)
    outside, constant = max(kind.outside for kind in kinds), max(kind.constant for kind in kinds)
    return Ledger(each("left"), each("own"), each("ticks"), outside, constant, seconds)


def of_planes(extension: Extension, blocks: int, recomputed: bool) -> Uniform:
    """Blocks that are alike, from the planes of a lattice row: all recomputed, or none.

    When the last block begins its forward, each one before it adds what it left to what it holds anyway (weights,
    gradients of an earlier micro-batch); when the first one begins, those after it add the latter: the difference is
    what is left.
    """
    kind, many = ("recomputed", (0, blocks)) if recomputed else ("kept", (blocks, 0))

    def per(found: Plane) -> float:
        return found.per_recomputed if recomputed else found.per_kept

    inside, outside = {}, {}
    planes = extension.moments
    for (phase, owner), found in planes.items():
        if phase == BEGUN:
            continue
        if owner == f"{kind} first":
            first, last = found.at(*many), planes[phase, f"{kind} last"].at(*many)
            inside[phase] = [round(first + (last - first) * i / max(1, blocks - 1)) for i in range(blocks)]
        elif not owner.startswith(("kept", "recomputed")):
            outside[phase, owner] = round(found.at(*many))
    left = round(per(planes[BEGUN, f"{kind} last"]) - per(planes[BEGUN, f"{kind} first"]))
    return Uniform(inside, outside, [left] * blocks, [per(extension.seconds)] * blocks)


def of_profile(profile: MemoryProfile, blocks: int) -> Uniform:
    """Blocks of several kinds, from a simulation of the whole model with all of them at one level."""
    starts = [profile.starts["forward", f"block {i}"] for i in range(blocks)] + [profile.starts["forward", "loss head"]]
    inside: dict[str, list[int]] = {}
    outside: dict[tuple[str, str], int] = {}
    for (phase, owner), size in profile.places.items():
        index = block_of(owner)
        if index is None:
            outside[phase, owner] = max(size, outside.get((phase, owner), 0))
        else:
            row = inside.setdefault(phase, [0] * blocks)
            row[index] = max(row[index], size)
    left = [after - before for before, after in pairwise(starts)]
    return Uniform(inside, outside, left, [profile.by_block.get(i, 0.0) for i in range(blocks)])


def chosen(levels: Sequence[str]) -> tuple[tuple[int, ...], Keep | tuple[Keep, ...]]:
    """(`recompute`, `keep`) of `ExactChoices` for a level a block."""
    again = tuple(i for i, level in enumerate(levels) if level != ALL)
    words: list[Keep] = [levels[i] for i in again]  # type: ignore[misc]
    return again, one_word(words)
