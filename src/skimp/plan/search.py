"""Search the exact techniques for the fastest run that fits a budget.

The lattice: rows per micro-batch x gradients held or stepped in backward x size of a logits chunk x number of
recomputed blocks. Each row of the lattice is simulated at three small depths and extended (`plan.extend`); the
winner is then simulated in full, and the next one tried if the full simulation does not confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skimp.activations.recompute import choose
from skimp.core.errors import ConflictError
from skimp.core.exact import ExactChoices
from skimp.core.memory.process import THRESHOLDS, Policy
from skimp.losses import default_rows
from skimp.plan.adapted import for_few_blocks
from skimp.plan.cost import Rates
from skimp.plan.extend import Extension, extend
from skimp.plan.extended import PROOF, extended
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate

#: Forwards of a block that a full simulation of one step may take before a second step is left out.
FULL_BLOCK_RUNS = 40
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
        budgets: tracked bytes that fit under each allocator policy on offer, and the time of a step under it against
            the fastest.
        rates, target: the device's.
    """

    def __init__(
        self,
        recipe: Any,
        config: dict[str, Any],
        blocks: int,
        budgets: Mapping[Policy, tuple[int, float]],
        rates: Rates,
        target: str,
    ) -> None:
        self.recipe, self.config, self.blocks, self.budgets = recipe, config, blocks, budgets
        self.rates, self.target = rates, target
        self.few = for_few_blocks(recipe, config)
        self._extensions: dict[ExactChoices, Extension] = {}

    def row(self, row: ExactChoices) -> Extension:
        """The extension of a lattice row, simulated once."""
        if row not in self._extensions:
            self._extensions[row] = extend(lambda blocks, recomputed: self.small(row, blocks, recomputed))
        return self._extensions[row]

    def known(self, row: ExactChoices) -> Extension | None:
        """The extension of a row that the search has simulated; None where it saw no need to."""
        return self._extensions.get(row)

    def small(self, row: ExactChoices, blocks: int, recomputed: int) -> MemoryProfile:
        """A simulation of a few blocks, the first `recomputed` of them recomputed."""
        return simulate(
            self.few,
            replace(row, recompute=choose(recomputed, blocks)),
            self.config,
            rates=self.rates,
            target=self.target,
            steps=1,
            blocks=blocks,
            micro_batches=2,
            short=True,
            evaluate=self.target != "cpu",
        )

    def sizes(self) -> list[int]:
        """Micro-batch sizes, smallest first: the pinned one, or the divisors of the step's rows."""
        pins, rows = self.recipe.exact, self.recipe.rows_per_step
        if pins.micro_batch:
            return [min(pins.micro_batch, rows)]
        return [n for n in range(1, rows + 1) if rows % n == 0]

    def rows(self, chunk: int | None = None, in_backward: bool = False) -> Iterator[ExactChoices]:
        """Lattice rows that the recipe's pins allow, smallest micro-batch first; in backward takes all rows at once."""
        rows = self.recipe.rows_per_step
        chunk = self.recipe.exact.loss_chunk or chunk
        if not in_backward:
            yield from (ExactChoices(size, (), chunk, False) for size in self.sizes())
        elif self.sizes()[-1] == rows:
            yield ExactChoices(rows, (), chunk, True)

    def pinned_count(self) -> int | None:
        """How many blocks the recipe pins for recompute; None leaves it free."""
        return pinned_recompute(self.recipe, self.blocks)

    def candidates(self) -> list[Candidate]:
        """The best of each row: as few recomputed blocks as fit.

        Tried in order of price, and no further than needed: gradients held; then, with clipping, in backward (two
        passes: never faster than held); then logits in the smallest chunks. Without clipping in backward costs
        nothing, so it is tried at once. Larger micro-batches are tried until one does not fit with every block
        recomputed: memory only grows with the micro-batch.
        """
        pinned = self.recipe.exact.in_backward
        found: list[Candidate] = []
        for chunk in (None, SMALL_CHUNK):
            if chunk is not None and not self._smaller_chunks_may_help(found):
                break
            if not pinned:
                found += self._along(self.rows(chunk))
            free = self.recipe.train.clip is None
            if pinned or (pinned is None and (free or not any(map(self.fits, found)))):
                found += self._along(self.rows(chunk, in_backward=True))
        if not found:
            raise ConflictError(
                "exact.in_backward=true",
                f"exact.micro_batch={self.recipe.exact.micro_batch} of {self.recipe.rows_per_step} rows",
                "the gradient of one micro-batch is not the step's gradient, and it is freed before the next",
                f"exact.micro_batch={self.recipe.rows_per_step}, or exact.in_backward=false",
            )
        return found

    def _smaller_chunks_may_help(self, found: list[Candidate]) -> bool:
        """Smaller chunks save at most one default chunk of logits; when more is missing they are not simulated."""
        if self.recipe.exact.loss_chunk or any(map(self.fits, found)):
            return False
        vocab, hidden = int(self.config["vocab_size"]), int(self.config.get("hidden_size", 0) or self.config["n_embd"])
        tokens = self.recipe.train.batch_tokens
        missing = min(c.peak - self.budgets[c.exact.malloc][0] for c in found) if found else 0
        return missing <= 4 * vocab * default_rows(tokens, hidden, vocab)

    def _along(self, rows: Iterator[ExactChoices]) -> list[Candidate]:
        found = []
        pinned = self.pinned_count()
        for row in rows:
            extension = self.row(row)
            fits = False
            for policy, (budget, slower) in self.budgets.items():
                if policy == "reuse" and not self.reusable(row):
                    continue
                count = pinned if pinned is not None else extension.fewest_recomputed(self.blocks, budget)
                fits = fits or count is not None
                count = self.blocks if count is None else count
                kept = self.blocks - count
                seconds = slower * self._repeats(row) * extension.seconds.at(kept, count)
                exact = replace(self.exact(row, count), malloc=policy)
                found.append(Candidate(exact, extension.peak(kept, count), seconds))
            if not fits:
                break
        return found

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
        if isinstance(pins, tuple):
            return ExactChoices(row.micro_rows, pins, row.loss_chunk, row.in_backward)
        return replace(row, recompute=choose(count, self.blocks))

    def _repeats(self, row: ExactChoices) -> float:
        """A small simulation runs two micro-batches at most; the step runs them all."""
        micro = -(-self.recipe.rows_per_step // row.micro_rows)
        return micro / min(micro, 2)

    def full(self, exact: ExactChoices, short: bool = False) -> MemoryProfile:
        """The whole model, two micro-batches at most (the third is like the second)."""
        micro = min(2, -(-self.recipe.rows_per_step // exact.micro_rows))
        # Optimizer states exist from the start, so the second step holds what the first held; the contract tables
        # compare both. For deep models one step with two micro-batches is simulated, to answer in seconds.
        steps = 2 if self.blocks * micro <= FULL_BLOCK_RUNS and not short else 1
        return simulate(
            self.recipe,
            exact,
            self.config,
            rates=self.rates,
            target=self.target,
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
        for candidate in filter(self.fits, found):
            # What is executed here is simulated in full; a card is planned for, and a proof is as good.
            profile = self.full(candidate.exact) if self.target == "cpu" else self.proved(candidate.exact)
            if self.fits(profile):
                return profile, found, candidate.seconds
        smallest = min(found, key=lambda c: c.peak - self.budgets[c.exact.malloc][0])
        return self.proved(smallest.exact), found, smallest.seconds

    def proved(self, exact: ExactChoices) -> MemoryProfile:
        """The profile extended from a few blocks, where a fourth simulation proves it; else the full simulation."""
        count = len(exact.recompute)
        row = replace(exact, recompute=(), malloc="return")
        alike = self.few is self.recipe  # an adapter on chosen layers makes blocks that differ
        if alike and self.blocks > sum(PROOF) and exact.recompute == choose(count, self.blocks):
            proof = self.small(row, sum(PROOF), PROOF[1])
            found = extended(self.row(row).corners, proof, exact, self.blocks - count, count)
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
