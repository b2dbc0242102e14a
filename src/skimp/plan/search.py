"""Search the exact techniques for the fastest run that fits a budget.

The lattice (`plan.lattice`): rows per micro-batch x gradients held or stepped in backward x size of a logits chunk x
what recomputed blocks keep x number of recomputed blocks. A root of the lattice is simulated at three small depths and
extended (`plan.extend`); what varies it is simulated where it changes something, and its differences add up. The
fastest point that fits is then simulated in full, and the next one tried if that does not confirm it.

More room never gives a slower plan: the points are the same whatever the budget, and what is left out could not be
faster, or could not fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count as counter
from typing import Any

from skimp.activations.recompute import choose
from skimp.core.errors import ConflictError
from skimp.core.exact import ExactChoices
from skimp.core.memory.process import THRESHOLDS, Policy
from skimp.plan.adapted import for_few_blocks
from skimp.plan.cost import Rates
from skimp.plan.extend import CORNERS, Corners, Extension
from skimp.plan.extended import PROOF, extended
from skimp.plan.lattice import Axis, Lattice, Space
from skimp.plan.profile import MemoryProfile
from skimp.plan.stored import simulated

#: Forwards of a block that a full simulation of one step may take before a second step is left out.
FULL_BLOCK_RUNS = 40
#: Corners to simulate for a change, by what it touches.
SIMULATED = {"outside": 1, "recomputed": 2, "all": 3}


@dataclass(frozen=True)
class Candidate:
    """One run of the lattice with its extended peak and seconds."""

    exact: ExactChoices
    peak: int
    seconds: float


class Search:
    """The lattice of one recipe on one device.

    Args:
        recipe, config: the run.
        blocks: number of the model's blocks.
        budgets: tracked bytes that fit under each allocator policy on offer, and the share of freed memory that it
            gives back to the system.
        rates, target: the device's.
        cards: how many the run is sharded over, by formula; the recipe is one card's.
    """

    def __init__(
        self,
        recipe: Any,
        config: dict[str, Any],
        blocks: int,
        budgets: Mapping[Policy, tuple[int, float]],
        rates: Rates,
        target: str,
        cards: int = 1,
    ) -> None:
        self.cards = cards
        self.recipe, self.config, self.blocks, self.budgets = recipe, config, blocks, budgets
        self.rates, self.target = rates, target
        self.few = for_few_blocks(recipe, config)
        self.lattice = Lattice(Space(recipe, config, blocks, target))
        self._profiles: dict[tuple[ExactChoices, int, int], MemoryProfile] = {}
        self._corners: dict[ExactChoices, Corners] = {}
        self._rows: dict[ExactChoices, Extension] = {}

    # ------------------------------------------------------------------------------------------------ simulations
    def small(self, row: ExactChoices, blocks: int, recomputed: int) -> MemoryProfile:
        """A simulation of a few blocks, the first `recomputed` of them recomputed; each made once."""
        key = (replace(row, malloc="return"), blocks, recomputed)
        if key not in self._profiles:
            self._profiles[key] = simulated(
                self.few,
                replace(row, recompute=choose(recomputed, blocks)),
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
        return self._profiles[key]

    def row(self, row: ExactChoices) -> Extension:
        """The extension of a lattice row: its root's, and what each axis changes on it."""
        if row not in self._rows:
            root = self.lattice.root(row)
            base = found = self._simulated(root, len(CORNERS))
            for axis, value in self.lattice.changes(row):
                found = found.plus(base, self._changed(root, axis, value))
            self._rows[row] = found.extension()
        return self._rows[row]

    @cached_property
    def further(self) -> int:
        """About what all active blocks but one take, where blocks train in turn: small simulations train one. By one
        row with gradients held; the full simulation has the last word."""
        layers = self.recipe.train.layers
        if layers is None or layers.active == 1:
            return 0
        peaks = []
        for active in (1, 2):
            few = for_few_blocks(self.recipe, self.config, active)
            options = {"target": self.target, "steps": 1, "blocks": 2, "micro_batches": 1, "short": True}
            found = simulated(few, ExactChoices(1), self.config, rates=self.rates, **options)
            peaks.append(found.peak.total)
        return (layers.active - 1) * max(0, peaks[1] - peaks[0])

    def known(self, row: ExactChoices) -> Extension | None:
        """The extension of a row that the search has simulated; None where it saw no need to."""
        return self._rows.get(row)

    def _changed(self, root: ExactChoices, axis: Axis, value: Any) -> Corners:
        """The root with one axis at another value, all corners."""
        row, base = replace(root, **{axis.name: value}), self._simulated(root, len(CORNERS))
        found = self._simulated(row, SIMULATED[axis.touches])
        if axis.touches == "outside" and not found.same_blocks(base):
            found = self._simulated(row, len(CORNERS))  # it reaches into the blocks of this model
        return found.completed(base)

    def _simulated(self, row: ExactChoices, corners: int) -> Corners:
        known = self._corners.get(row)
        if known is None or len(known.moments) < corners:
            known = Corners.of([self.small(row, kept + again, again) for kept, again in CORNERS[:corners]])
            self._corners[row] = known
        return known

    # ------------------------------------------------------------------------------------------------ candidates
    def pinned_count(self) -> int | None:
        """How many blocks the recipe pins for recompute; None leaves it free."""
        return pinned_recompute(self.recipe, self.blocks)

    def candidates(self) -> list[Candidate]:
        """The best of each row: as few recomputed blocks as fit.

        Larger micro-batches are tried until one does not fit at its smallest: memory only grows with the micro-batch.
        In backward is the last: held with all rows at once and nothing recomputed does a part of the same work.
        """
        pinned, rows = self.recipe.exact.in_backward, self.recipe.rows_per_step
        found: list[Candidate] = []
        if not pinned:
            for root in self.lattice.roots(in_backward=False):
                points = self._root(root)
                found += points
                if not any(map(self.fits, points)):
                    break
        plain = [c for c in found if self.fits(c) and c.exact.micro_rows == rows and not c.exact.recompute]
        if pinned or (pinned is None and (not plain or self.recipe.train.clip is None)):
            for root in self.lattice.roots(in_backward=True):
                found += self._root(root)
        if not found:
            raise ConflictError(
                "exact.in_backward=true",
                f"exact.micro_batch={self.recipe.exact.micro_batch} of {self.recipe.rows_per_step} rows",
                "the gradient of one micro-batch is not the step's gradient, and it is freed before the next",
                f"exact.micro_batch={self.recipe.rows_per_step}, or exact.in_backward=false",
            )
        return found

    def _root(self, root: ExactChoices) -> list[Candidate]:
        """The best of each row of a root. Values of less memory are tried where something is recomputed or does not
        fit without them; faster ones, that take more, only where the root fits."""
        points = self._points(root)
        fits = any(map(self.fits, points))
        least = self.lattice.least(root)
        if not fits and least != root:
            points += self._points(least)
            if not any(map(self.fits, points)):
                return points
        tried: dict[str, list[Any]] = {axis.name: [getattr(root, axis.name)] for axis in self.lattice.axes}
        for axis in self.lattice.axes:
            faster, _, less = self.lattice.values(axis, root)
            spends = any(c.exact.recompute or not self.fits(c) for c in points)
            if axis.touches == "recomputed" and not any(c.exact.recompute for c in points):
                continue
            if fits:
                for value in faster:
                    tried[axis.name].append(value)
                    if not any(map(self.fits, self._points(replace(root, **{axis.name: value})))):
                        break
            tried[axis.name] += less if spends else []
            seen = {replace(c.exact, recompute=(), malloc="return") for c in points}
            for row in self.lattice.rows(root, tried):
                points += self._points(row) if row not in seen else []
        return points

    def _points(self, row: ExactChoices) -> list[Candidate]:
        """The row under each allocator policy, with as few recomputed blocks as fit; all of them where none does."""
        extension, pinned, found = self.row(row), self.pinned_count(), []
        for policy, (budget, _) in self.budgets.items():
            if policy == "reuse" and not self.reusable(row):
                continue
            count = pinned
            if count is None:
                count = extension.fewest_recomputed(self.blocks, budget - self.further)
            found.append(self.point(row, policy, self.blocks if count is None else count))
        return found

    def point(self, row: ExactChoices, policy: Policy, count: int) -> Candidate:
        """One point of the lattice, extended."""
        extension, kept = self.row(row), self.blocks - count
        seconds = self.slower(row, policy) * extension.seconds.at(kept, count)
        peak = extension.peak(kept, count) + self.further
        return Candidate(replace(self.exact(row, count), malloc=policy), peak, seconds)

    def reusable(self, row: ExactChoices) -> bool:
        """Whether a block's activations lie under the "reuse" threshold, so that they stay on the heap at all.

        Larger ones come and go as mappings whatever the policy; mixed with a heap of small ones they left it so
        fragmented that the resident peak stood 0.5 GB above its plan (4 x 512 tokens of SmolLM2).
        """
        if "reuse" not in self.budgets or "return" not in self.budgets:
            return True  # pinned by the recipe
        config = self.config
        widest = max(
            int(config.get(k) or 0) for k in ("hidden_size", "intermediate_size", "n_embd", "n_inner", "ffn_dim")
        )
        widest = max(widest, 4 * int(config.get("n_embd") or 0))
        return row.micro_rows * self.recipe.data.seq_len * widest * 4 <= THRESHOLDS["reuse"]

    def fits(self, candidate: Candidate | MemoryProfile) -> bool:
        """Whether a candidate's or a profile's peak lies within its policy's budget."""
        peak = candidate.peak if isinstance(candidate, Candidate) else candidate.peak_bytes
        return peak <= self.budgets[candidate.exact.malloc][0]

    def exact(self, row: ExactChoices, count: int) -> ExactChoices:
        """The row with `count` blocks recomputed, or with the very blocks the recipe pins."""
        pins = self.recipe.exact.recompute
        return replace(row, recompute=pins if isinstance(pins, tuple) else choose(count, self.blocks))

    def slower(self, row: ExactChoices, policy: Policy) -> float:
        """Time of a step under an allocator policy against one whose freed memory is used again at once: pages that
        went back to the system must be mapped and zeroed anew."""
        share = self.budgets[policy][1]
        if not share or not self.rates.fault:
            return 1.0
        profile = self.small(self.lattice.root(row), 2, 1)
        return 1.0 + share * self.rates.fault * profile.fresh / profile.seconds

    # ------------------------------------------------------------------------------------------------ confirmation
    def full(self, exact: ExactChoices, short: bool = False) -> MemoryProfile:
        """The whole model, two micro-batches at most (the third is like the second)."""
        micro = min(2, -(-self.recipe.rows_per_step // exact.micro_rows))
        # Optimizer states exist from the start, so the second step holds what the first held; the contract tables
        # compare both. For deep models one step with two micro-batches is simulated, to answer in seconds.
        steps = 2 if self.blocks * micro <= FULL_BLOCK_RUNS and not short else 1
        return simulated(
            self.recipe,
            exact,
            self.config,
            rates=self.rates,
            target=self.target,
            cards=self.cards,
            steps=steps,
            micro_batches=2,
            short=short,
        )

    def best(self) -> tuple[MemoryProfile, list[Candidate], float]:
        """The fastest candidate that a full simulation confirms; else the smallest one.

        Returns:
            (profile of the choice, all candidates fastest first, predicted seconds of a step).
        """
        found = sorted(self.candidates(), key=lambda c: (not self.fits(c), c.seconds, c.peak))
        order = counter()
        queue = [(c.seconds, c.peak, next(order), c) for c in found if self.fits(c)]
        heapq.heapify(queue)
        while queue:
            candidate = heapq.heappop(queue)[-1]
            # What is executed here is simulated in full; a card is planned for, and a proof is as good.
            profile = self.full(candidate.exact) if self.target == "cpu" else self.proved(candidate.exact)
            if self.fits(profile):
                return profile, found, candidate.seconds
            for more in self._one_more(candidate, profile):
                heapq.heappush(queue, (more.seconds, more.peak, next(order), more))
        smallest = min(found, key=lambda c: c.peak - self.budgets[c.exact.malloc][0])
        return self.proved(smallest.exact), found, smallest.seconds

    def _one_more(self, candidate: Candidate, profile: MemoryProfile) -> Iterator[Candidate]:
        """The next point of a row whose extension was too hopeful: one block more recomputed.

        Args:
            profile: what a full simulation says of the candidate.
        """
        count = len(candidate.exact.recompute) + 1
        if self.pinned_count() is None and count <= self.blocks and not candidate.exact.offload:
            row = replace(candidate.exact, recompute=(), malloc="return")
            yield self.point(row, candidate.exact.malloc, count)

    def proved(self, exact: ExactChoices) -> MemoryProfile:
        """The profile extended from a few blocks, where a fourth simulation proves it; else the full simulation."""
        count = len(exact.recompute)
        row = replace(exact, recompute=(), malloc="return")
        alike = self.few is self.recipe  # an adapter on chosen layers makes blocks that differ
        if alike and self.blocks > sum(PROOF) and exact.recompute == choose(count, self.blocks):
            corners = [self.small(row, kept + again, again) for kept, again in CORNERS]
            found = extended(corners, self.small(row, sum(PROOF), PROOF[1]), exact, self.blocks - count, count)
            if found is not None:
                return found
        return self.full(exact, short=True)


def pinned_recompute(recipe: Any, blocks: int) -> int | None:
    """The recipe's `exact.recompute` as a count of blocks; None when the planner may choose."""
    pins = recipe.exact.recompute
    if pins is None:
        return None
    if pins == "none":
        return 0
    if pins == "all":
        return blocks
    return len(pins) if isinstance(pins, tuple) else min(int(pins), blocks)
