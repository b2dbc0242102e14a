"""What of a run waits elsewhere, as far as a plan may choose it: blocks' activations, optimizer states.

Tried when nothing fits without, since it costs the disk's life and the cores' time, or when a recipe pins it; beside a
card, whose copies to the host pass unseen, also where it is faster than recompute.

A run that offloads the first n of its blocks has at most two of them in memory, at any depth: live bytes at a fixed
moment are affine in the blocks away and the blocks here, once four are away. Three simulations of six and seven blocks
fix them, as in `plan.extend`; with gradients held until backward is over, the fullest block is the second of all, the
first that still has the one before it in memory, so second and next to last moments are kept beside first and last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from skimp.activations.offload import choose
from skimp.core.exact import ExactChoices, Place, Residence
from skimp.core.registry import conflict_of
from skimp.core.units import format_bytes
from skimp.plan import transfers
from skimp.plan.mixed import MixedSearch
from skimp.plan.profile import MemoryProfile
from skimp.plan.search import Candidate
from skimp.plan.simulate import simulate
from skimp.run.techniques import techniques

#: (away, here) blocks of the three simulations.
CORNERS = ((4, 2), (5, 2), (4, 3))
LEAST = CORNERS[0][0]


@dataclass(frozen=True)
class Line:
    """value(away, here) = base + per_away * away + per_here * here."""

    base: float
    per_away: float
    per_here: float

    @classmethod
    def through(cls, values: list[float]) -> Line:
        """The corners' values in their order."""
        away, here = values[1] - values[0], values[2] - values[0]
        return cls(values[0] - CORNERS[0][0] * away - CORNERS[0][1] * here, away, here)

    def at(self, away: int, here: int) -> float:
        return self.base + self.per_away * away + self.per_here * here


@dataclass(frozen=True)
class Depths:
    """Moments and seconds of a run with some blocks away and the others here, for any number of either."""

    moments: Mapping[tuple[str, str], Line]
    seconds: Line

    @classmethod
    def of(cls, profiles: list[MemoryProfile]) -> Depths:
        """From simulations at `CORNERS`."""
        found = [_moments(p, *at) for p, at in zip(profiles, CORNERS, strict=True)]
        shared = set(found[0]) & set(found[1]) & set(found[2])
        return cls(
            {m: Line.through([f[m] for f in found]) for m in shared}, Line.through([p.seconds for p in profiles])
        )

    def peak(self, away: int, here: int) -> int:
        """Peak bytes; `away` at least `LEAST`."""
        there = (line.at(away, here) for (_, owner), line in self.moments.items() if here or owner[:4] != "here")
        return round(max(there))


def _moments(profile: MemoryProfile, away: int, here: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for (phase, owner), size in profile.places.items():
        for name in _names(owner, away, here):
            found[phase, name] = max(found.get((phase, name), 0.0), size)
    return found


def _names(owner: str, away: int, here: int) -> list[str]:
    """'block 1' of four away and two here is the second away; what is outside the blocks keeps its name."""
    words = owner.split()[1:] if owner.startswith("block ") else owner.split(".")
    index = next((int(word) for word in words if word.isdigit()), None)
    if index is None:
        return [owner]
    if index < away:
        ranks = {"away first": 0, "away second": 1, "away next to last": away - 2, "away last": away - 1}
    else:
        ranks = {"here first": away, "here last": away + here - 1}
    return [name for name, at in ranks.items() if at == index]


class OffloadingSearch(MixedSearch):
    """A search that may let things wait elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked = self.recipe.exact.offload
        near: Place = "disk" if self.target == "cpu" else "host"
        here = techniques(self.recipe, ExactChoices(1))
        self.places = _ways(asked.activations, near, "activation-offload", here)
        self.homes = _ways(asked.optimizer, near, "state-offload", here)
        self._pinned = asked.activations in ("host", "disk") or asked.optimizer in ("host", "disk")
        self._depths: dict[ExactChoices, Depths] = {}

    def candidates(self) -> list[Candidate]:
        """What the recipe pins; else the points that offload nothing, and the others where those do not do."""
        if self._pinned:
            return self._away()
        found = super().candidates()
        fitting = [c for c in found if self.fits(c)]
        # Copies to the host of a card pass unseen and wear nothing: they may be faster than running blocks again.
        if not fitting or (self.target != "cpu" and all(c.exact.recompute for c in fitting)):
            found += self._away()
        return found

    def proved(self, exact: ExactChoices) -> MemoryProfile:
        """A run with blocks away is simulated in full: blocks differ by what is in memory beside them."""
        return self.full(exact, short=True) if exact.offload else super().proved(exact)

    def _away(self) -> list[Candidate]:
        """States alone, then activations alone, then both; no further than to the first that fits, but for one thing:
        where states alone leave blocks to recompute, their activations may go as well."""
        found: list[Candidate] = []
        ways = sorted(product(self.homes, self.places), key=lambda way: (way.count(None) == 0, way[0] is None))
        for home, place in ways:
            if home is None and place is None:
                continue
            if place is not None and home is None and any(map(self.fits, found)):
                continue
            if not self._pinned and self._always_here(home) > max(budget for budget, _ in self.budgets.values()):
                continue
            found += self._stage(home or "device", place)
            best = [c for c in found if self.fits(c)]
            if best and (place is not None or not all(c.exact.recompute for c in best)):
                break
        return found

    def _always_here(self, home: Residence | None) -> int:
        """Bytes that no offload moves: the weights, and the states where they stay. Blocks are alike, so two small
        simulations fix the line; they were made for the points that offload nothing."""
        root = next(iter(self.lattice.roots(in_backward=bool(self.recipe.exact.in_backward))))
        kinds = ("weights",) if home else ("weights", "optimizer")
        two, three = (sum(self.small(root, n, n - 1).resting.get(k, 0) for k in kinds) for n in (2, 3))
        return two + (three - two) * (self.blocks - 2)

    def _stage(self, home: Residence, place: Place | None) -> list[Candidate]:
        """The micro-batches of one way, smallest first, until one does not fit; in backward where none does, or where
        it costs nothing."""
        pinned, found = self.recipe.exact.in_backward, list[Candidate]()
        if not pinned:
            for root in self.lattice.roots(in_backward=False):
                points = self._choices(replace(root, states=home), place)
                found += points
                if not any(map(self.fits, points)):
                    break
        if pinned or (pinned is None and (self.recipe.train.clip is None or not any(map(self.fits, found)))):
            for root in self.lattice.roots(in_backward=True):
                found += self._choices(replace(root, states=home), place)
        return found

    def _choices(self, row: ExactChoices, place: Place | None) -> list[Candidate]:
        return self._root(row) if place is None else list(self._blocks(replace(row, offload_to=place)))

    def _one_more(self, candidate: Candidate, profile: MemoryProfile) -> Iterator[Candidate]:
        """The next point of a row whose extension was too hopeful: with blocks away, one more of them."""
        away = len(candidate.exact.offload) + 1
        if not candidate.exact.offload:
            yield from super()._one_more(candidate, profile)
        elif candidate.exact.offload == choose(away - 1, self.blocks) and away <= self.blocks and self.named is None:
            exact = replace(candidate.exact, offload=choose(away, self.blocks))
            yield Candidate(exact, candidate.peak, candidate.seconds)

    def _blocks(self, row: ExactChoices) -> Iterator[Candidate]:
        """The row with blocks away: without recompute, and with every block recomputed (or as pinned)."""
        pinned, total, named = self.pinned_count(), self.blocks, self.named
        for count in sorted({0, total} if pinned is None else {pinned}):
            fits = False
            for policy in self.budgets:
                made = replace(self.exact(row, count), malloc=policy)
                if named is None and total >= sum(CORNERS[2]) and count in (0, total):
                    point = self._fewest(made)
                else:
                    made = replace(made, offload=tuple(range(total)) if named is None else named)
                    profile = self.full(made, short=True)
                    point = self._candidate(made, profile.peak_bytes, profile.seconds)
                fits = fits or self.fits(point)
                yield point
            if fits:
                return

    @property
    def named(self) -> tuple[int, ...] | None:
        """The blocks that the recipe names; None leaves their number to the plan."""
        blocks = self.recipe.exact.offload.blocks
        if blocks is None or isinstance(blocks, tuple):
            return blocks
        return choose(self.blocks if blocks == "all" else int(blocks), self.blocks)

    def _candidate(self, exact: ExactChoices, peak: int, seconds: float) -> Candidate:
        return Candidate(exact, peak, self.slower(exact, exact.malloc) * seconds)

    def _fewest(self, made: ExactChoices) -> Candidate:
        depths, total = self._simulated_depths(made), self.blocks
        budget = self.budgets[made.malloc][0]
        fits = (n for n in range(LEAST, total + 1) if depths.peak(n, total - n) <= budget)
        away = next(fits, total)
        here = total - away
        return self._candidate(
            replace(made, offload=choose(away, total)), depths.peak(away, here), depths.seconds.at(away, here)
        )

    def _simulated_depths(self, made: ExactChoices) -> Depths:
        key = replace(made, malloc="return")
        if key not in self._depths:
            self._depths[key] = Depths.of([self._few_away(key, *at) for at in CORNERS])
        return self._depths[key]

    def _few_away(self, exact: ExactChoices, away: int, here: int) -> MemoryProfile:
        blocks = away + here
        return simulate(
            self.few,
            replace(exact, offload=choose(away, blocks), recompute=choose(blocks, blocks) if exact.recompute else ()),
            self.config,
            rates=self.rates,
            target=self.target,
            cards=self.cards,
            steps=1,
            blocks=blocks,
            micro_batches=2,
            short=True,
            evaluate=self.target != "cpu",
        )


def _ways(asked: Any, near: Any, method: str, others: list[str]) -> list[Any]:
    """A pinned place alone; or here (None) and the nearest place away, unless the recipe's other methods forbid it."""
    if asked == "none" or (asked is None and any(conflict_of(method, other) for other in others)):
        return [None]
    return [asked] if asked else [None, near]


def reasons(exact: ExactChoices, profile: MemoryProfile, blocks: int, near: str) -> list[str]:
    """What waits elsewhere, in sentences with bytes."""
    found = []
    if exact.offload:
        source = transfers.way(exact.offload_to, near).source
        found.append(
            f"activations of {len(exact.offload)} of {blocks} blocks wait on {exact.offload_to}: at most two of them "
            f"are in memory ({source})"
        )
    if exact.states != "device":
        update = "and are updated there" if exact.states == "host" else "and come for their own update"
        found.append(f"optimizer states live on {exact.states} {update}")
    if found:
        held = " and ".join(f"{format_bytes(size)} on {place}" for place, size in profile.away.items())
        found[-1] += f"; {held} in all"
    return found


def overrides(exact: ExactChoices) -> tuple[str, ...]:
    """What to type for it."""
    found: tuple[str, ...] = ()
    if exact.offload:
        blocks = list(exact.offload)
        named = len(blocks) if blocks == list(range(len(blocks))) else str(blocks).replace(" ", "")
        found += (f"exact.offload.activations={exact.offload_to}", f"exact.offload.blocks={named}")
    if exact.states != "device":
        found += (f"exact.offload.optimizer={exact.states}",)
    return found
