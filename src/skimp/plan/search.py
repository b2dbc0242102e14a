"""Search the exact techniques for the fastest run that fits a budget.

The lattice: rows per micro-batch x gradients held or stepped in backward x size of a logits chunk x number of
recomputed blocks. Each row of the lattice is simulated at three small depths and extended (`plan.extend`); the
winner is then simulated in full, and the next one tried if the full simulation does not confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skimp.core.errors import ConflictError
from skimp.core.exact import ExactChoices
from skimp.plan.cost import Rates
from skimp.plan.extend import Extension, choices, extend
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate

#: Rows of logits tried when the head's own rule does not fit.
SMALL_CHUNK = 64


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
        budget: tracked bytes that fit.
        rates, target: the device's.
    """

    def __init__(
        self, recipe: Any, config: dict[str, Any], blocks: int, budget: int, rates: Rates, target: str
    ) -> None:
        self.recipe, self.config, self.blocks, self.budget = recipe, config, blocks, budget
        self.rates, self.target = rates, target
        self._extensions: dict[ExactChoices, Extension] = {}

    def row(self, row: ExactChoices) -> Extension:
        """The extension of a lattice row, simulated once."""
        if row not in self._extensions:
            self._extensions[row] = extend(
                lambda blocks, recomputed: simulate(
                    self.recipe, choices(row, 0) if not recomputed else _with(row, recomputed), self.config,
                    rates=self.rates, target=self.target, steps=1, blocks=blocks, micro_batches=2,
                )
            )
        return self._extensions[row]

    def rows(self) -> Iterator[ExactChoices]:
        """Lattice rows that the recipe's pins allow, largest micro-batch first."""
        pins = self.recipe.exact
        rows = self.recipe.rows_per_step
        sizes = [pins.micro_batch] if pins.micro_batch else [n for n in range(rows, 0, -1) if rows % n == 0]
        if pins.in_backward and min(max(sizes), rows) < rows:
            raise ConflictError(
                "exact.in_backward=true", f"exact.micro_batch={pins.micro_batch} of {rows} rows",
                "the gradient of one micro-batch is not the step's gradient, and it is freed before the next",
                f"exact.micro_batch={rows}, or exact.in_backward=false",
            )
        chunks = [pins.loss_chunk] if pins.loss_chunk else [None, SMALL_CHUNK]
        for size in sizes:
            for chunk in chunks:
                for in_backward in (False, True):
                    if in_backward and size < rows or pins.in_backward not in (None, in_backward):
                        continue
                    yield ExactChoices(min(size, rows), (), chunk, in_backward)

    def pinned_count(self) -> int | None:
        """How many blocks the recipe pins for recompute; None leaves it free."""
        return pinned_recompute(self.recipe, self.blocks)

    def candidates(self) -> list[Candidate]:
        """The best of each row: as few recomputed blocks as fit; rows that do not fit at all with all recomputed."""
        found = []
        pinned = self.pinned_count()
        small_needed = False
        for row in self.rows():
            if row.loss_chunk == SMALL_CHUNK and self.recipe.exact.loss_chunk is None and not small_needed:
                continue
            extension = self.row(row)
            count = pinned if pinned is not None else extension.fewest_recomputed(self.blocks, self.budget)
            if count is None:
                count, small_needed = self.blocks, row.loss_chunk is None
            elif row.loss_chunk is None:
                small_needed = False
            kept = self.blocks - count
            factor = self._repeats(row)
            found.append(
                Candidate(
                    self.exact(row, count), extension.peak(kept, count), factor * extension.seconds.at(kept, count)
                )
            )
        return found

    def exact(self, row: ExactChoices, count: int) -> ExactChoices:
        """The row with `count` blocks recomputed, or with the very blocks the recipe pins."""
        pins = self.recipe.exact.recompute
        if isinstance(pins, tuple):
            return ExactChoices(row.micro_rows, pins, row.loss_chunk, row.in_backward)
        return choices(row, count)

    def _repeats(self, row: ExactChoices) -> float:
        """A small simulation runs two micro-batches at most; the step runs them all."""
        micro = -(-self.recipe.rows_per_step // row.micro_rows)
        return micro / min(micro, 2)

    def full(self, exact: ExactChoices) -> MemoryProfile:
        """The whole model, both steps, three micro-batches at most (the third is like the second)."""
        profile = simulate(
            self.recipe, exact, self.config, rates=self.rates, target=self.target, steps=2, micro_batches=2
        )
        return profile

    def best(self) -> tuple[MemoryProfile, list[Candidate], float]:
        """The fastest candidate that a full simulation confirms; else the smallest one.

        Returns:
            (full profile of the choice, all candidates fastest first, predicted seconds of a step).
        """
        found = sorted(self.candidates(), key=lambda c: (c.peak > self.budget, c.seconds, c.peak))
        fitting = [c for c in found if c.peak <= self.budget]
        for candidate in fitting:
            profile = self.full(candidate.exact)
            if profile.peak_bytes <= self.budget:
                return profile, found, candidate.seconds
        smallest = min(found, key=lambda c: c.peak)
        return self.full(smallest.exact), found, smallest.seconds


def _with(row: ExactChoices, recomputed: tuple[int, ...]) -> ExactChoices:
    return ExactChoices(row.micro_rows, recomputed, row.loss_chunk, row.in_backward)


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
