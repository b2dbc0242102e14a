"""A search that may recompute any subset of the blocks, each at a level of its own (`plan.levels`).

The lattice's own points recompute the first blocks, all at one level: for blocks that are alike nearly the best there
is. Where blocks differ (windows beside full attention, an adapter in some of them) it matters which of them are
recomputed, and everywhere a mixture of levels lies between two points. The points of the lattice stay among the
candidates, so nothing is ever slower than they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from skimp.activations.recompute import choose
from skimp.core.exact import ExactChoices
from skimp.core.memory.process import Policy
from skimp.plan.levels import ALL, Ledger, chosen, ledger, of_planes, of_profile, stitched
from skimp.plan.profile import MemoryProfile
from skimp.plan.search import Candidate, Search
from skimp.run.skeleton import kinds_of_blocks


class MixedSearch(Search):
    """A search with a ledger of its blocks for each row of the lattice; its arguments are `Search`'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kinds = kinds_of_blocks(self.config, self.recipe.data.seq_len)
        several = len(set(self.kinds)) > 1
        whole = self.few is not self.recipe and self.recipe.train.layers is None
        self.alike = not several and not whole
        #: by kind of block, the search of a model with blocks of that kind alone.
        self.pure: dict[str, Search] = {}
        for kind in dict.fromkeys(self.kinds) if several and not whole else ():
            self.pure[kind] = Search(
                self.recipe,
                {**self.config, "layer_types": [kind] * self.blocks},
                *(self.blocks, self.budgets, self.rates, self.target, self.cards),
            )
        self._ledgers: dict[ExactChoices, Ledger] = {}

    def candidates(self) -> list[Candidate]:
        """The lattice's, and a mixture for each row that could be faster than the best of them."""
        if isinstance(self.recipe.exact.keep, tuple):
            return [self.at(replace(row, malloc=p)) for row in self._as_pinned() for p in self.budgets]
        found = super().candidates()
        return found if self.recipe.train.layers is not None else found + self.mixtures(found)

    def _points(self, row: ExactChoices) -> list[Candidate]:
        """As the lattice's, but for blocks of several kinds by what each kind takes."""
        if not self.pure:
            return super()._points(row)
        found, pinned = [], self.pinned_count()
        for policy in self.budgets:
            if self._may(row, policy):
                counts = range(self.blocks + 1) if pinned is None else (pinned,)
                points = [self.point(row, policy, count) for count in counts]
                found.append(next(filter(self.fits, points), points[-1]))
        return found

    def point(self, row: ExactChoices, policy: Policy, count: int) -> Candidate:
        """One point of the lattice."""
        return (
            self.at(replace(self.exact(row, count), malloc=policy)) if self.pure else super().point(row, policy, count)
        )

    def mixtures(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The fastest mixture of each row that recomputes something and could be faster than all that fit; what keeps
        all is the least that a row can take."""
        fitting = [c.seconds for c in found if self.fits(c)]
        if not fitting:
            return []  # all blocks that keep nothing are the lattice's own, and leave the least
        best = min(fitting)
        rows = dict.fromkeys(plain(c.exact) for c in found if c.exact.recompute and not c.exact.offload)
        points = [self.point(row, policy, 0) for row in rows for policy in self.budgets if self._may(row, policy)]
        mixed = []
        for point in sorted(points, key=lambda c: (c.seconds, c.peak)):
            if point.seconds >= best:
                break
            candidate = self.mixture(plain(point.exact), point.exact.malloc)
            if candidate is not None and candidate.seconds < best:
                mixed.append(candidate)
                best = candidate.seconds
        return mixed

    def mixture(self, row: ExactChoices, policy: Policy, over: int = 0) -> Candidate | None:
        """The fastest mixture of a row that fits, by its ledger; None where none does.

        Args:
            over: bytes by which the ledger is too hopeful here.
        """
        levels = self.ledger(row).solve(self.budgets[policy][0] - self.further - over, self.allowed(row))
        if levels is None:
            return None
        again, keep = chosen(levels)
        return self.at(replace(row, recompute=again, keep=keep, malloc=policy))

    def at(self, exact: ExactChoices) -> Candidate:
        """Any point, its blocks at any levels."""
        kept, count = exact.kept(), len(exact.recompute)
        if isinstance(exact.keep, str) and exact.recompute == choose(count, self.blocks) and self.alike:
            return self.point(replace(exact, recompute=(), malloc="return"), exact.malloc, count)
        row = plain(exact)
        found, levels = self.ledger(row), [str(kept.get(i, ALL)) for i in range(self.blocks)]
        seconds = self.slower(row, exact.malloc) * found.time(levels)
        return Candidate(exact, found.peak(levels) + self.further, seconds)

    def seen(self, exact: ExactChoices) -> Candidate | None:
        """The point, where nothing more must be simulated for it."""
        row, words = plain(exact), {"nothing", *exact.kept().values()}
        if not self.alike:
            return self.at(exact) if row in self._ledgers else None
        if isinstance(exact.keep, str) and exact.recompute == choose(len(exact.recompute), self.blocks):
            words = {exact.keep}
        return self.at(exact) if all(self.known(replace(row, keep=word)) for word in words) else None

    def ledger(self, row: ExactChoices) -> Ledger:
        """Of the blocks at a row: from the planes of blocks that are alike or of each kind, else from the whole model
        with all of them at each level."""
        row = plain(row)
        if row not in self._ledgers:
            words = self._words(row)
            if self.alike:
                self._ledgers[row] = by_planes(self, row, words)
            elif self.pure:
                found = {kind: by_planes(search, row, words) for kind, search in self.pure.items()}
                self._ledgers[row] = stitched([found[kind] for kind in self.kinds])
            else:
                every = choose(self.blocks, self.blocks)
                whole = {word: self.full(replace(row, recompute=every, keep=word), short=True) for word in words}
                whole[ALL] = self.full(row, short=True)
                levels = {level: of_profile(profile, self.blocks) for level, profile in whole.items()}
                self._ledgers[row] = ledger(levels, whole[ALL].seconds)
        return self._ledgers[row]

    def allowed(self, row: ExactChoices) -> list[list[str]]:
        """The levels that the recipe leaves each block."""
        pins, words = self.recipe.exact.recompute, list(self._words(row))
        if pins is None:
            return [[ALL, *words]] * self.blocks
        again = set(self.exact(row, self.pinned_count() or 0).recompute)
        return [words if i in again else [ALL] for i in range(self.blocks)]

    def _words(self, row: ExactChoices) -> tuple[Any, ...]:
        asked = self.recipe.exact.keep
        if asked is None:
            (axis,) = (a for a in self.lattice.axes if a.name == "keep")
            return tuple(axis.values(self.lattice.space, self.lattice.root(row)))
        return (asked,) if isinstance(asked, str) else tuple(dict.fromkeys(asked))

    def _may(self, row: ExactChoices, policy: Policy) -> bool:
        return policy != "reuse" or self.reusable(row)

    def _as_pinned(self) -> Iterator[ExactChoices]:
        """Every row, with the very levels that the recipe pins block by block."""
        for row in {plain(row): None for row in self.lattice.everywhere()}:
            exact = self.exact(row, self.pinned_count() or 0)
            yield replace(exact, keep=self.recipe.exact.keep)

    def _one_more(self, candidate: Candidate, profile: MemoryProfile) -> Iterator[Candidate]:
        """After a mixture that a full simulation refutes: the next one that fits by as much as this one did not."""
        exact = candidate.exact
        mixed = exact.keep != "nothing" or exact.recompute != choose(len(exact.recompute), self.blocks)
        if not mixed or exact.offload or self.recipe.train.layers is not None:
            yield from super()._one_more(candidate, profile)
            return
        budget = self.budgets[exact.malloc][0]
        # Both the ledger's error here and a byte less than this very point.
        over = max(profile.peak_bytes - candidate.peak, budget - candidate.peak + 1)
        other = self.mixture(plain(exact), exact.malloc, over)
        if other is not None and self.pinned_count() is None:
            yield other


def by_planes(search: Search, row: ExactChoices, words: Sequence[Any]) -> Ledger:
    """The ledger of blocks that are alike, from the planes of a row and of its levels."""
    levels = {ALL: of_planes(search.row(row), search.blocks, recomputed=False)}
    for word in words:
        levels[word] = of_planes(search.row(replace(row, keep=word)), search.blocks, recomputed=True)
    return ledger(levels, search.row(row).seconds.at(search.blocks, 0))


def plain(exact: ExactChoices) -> ExactChoices:
    """The row of a point without its levels."""
    return replace(exact, recompute=(), keep="nothing", malloc="return", offload=())
