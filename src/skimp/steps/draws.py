"""Which blocks train in a period: pure functions of (seed, period), so that a resumed run draws what it would have.

- `Uniform`: `active` distinct blocks, each equally often (LISA).
- `Systematic`: `active` distinct blocks, block l in a share `inclusion(weights, active)[l]` of the periods, exactly.
  Drawing without replacement by weight, one block after the other, does not give those shares: with active 5 and the
  published scores of LLaMA2-7B a block of weight 0.135 trains 0.55 of the time instead of 0.675 (OwLore's code).
- `Ordered`: every block once a round, `active` neighbours of the round's order at a time (BAdam).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

from skimp.core.noise import random_uint32
from skimp.core.read import read

Order = Literal["random", "ascending", "descending"]
#: Names of the streams of random numbers. A period is the stream.
PERMUTATION, START = "layers", "layers.start"


class Draw(Protocol):
    """The blocks of one period, ascending."""

    def at(self, period: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Uniform:
    """`active` of `count` blocks without replacement: the first ones of a random permutation."""

    seed: int
    count: int
    active: int

    def at(self, period: int) -> tuple[int, ...]:
        return tuple(sorted(permutation(self.seed, period, self.count)[: self.active]))


@dataclass(frozen=True)
class Ordered:
    """Every block once in ceil(count / active) periods; the last group of a round may be smaller."""

    seed: int
    count: int
    active: int
    order: Order = "random"

    def at(self, period: int) -> tuple[int, ...]:
        turn, group = divmod(period, -(-self.count // self.active))
        line = list(range(self.count))
        if self.order == "random":
            line = permutation(self.seed, turn, self.count)
        elif self.order == "descending":
            line.reverse()
        return tuple(sorted(line[group * self.active : (group + 1) * self.active]))


@dataclass(frozen=True)
class Systematic:
    """Systematic sampling over a random order: block l is drawn when one of `active` points, a unit apart and begun
    at one random place, falls into its stretch of length `inclusion[l]`. Stretches are at most 1 long, so blocks are
    distinct, and the share of the periods in which a block is drawn is its length.
    """

    seed: int
    weights: tuple[float, ...]
    active: int

    def at(self, period: int) -> tuple[int, ...]:
        shares = inclusion(self.weights, self.active)
        line = permutation(self.seed, period, len(shares))
        begin = read(random_uint32(self.seed, START, 0, 1, stream=period), expect=0.0) / 2**32
        edges = [0.0]
        for block in line:
            edges.append(edges[-1] + shares[block])
        edges[-1] = float(self.active)  # what sums of floats missed
        found, point = [], begin
        for block, (low, high) in zip(line, pairwise(edges), strict=True):
            if low <= point < high:
                found.append(block)
                point += 1.0
        return tuple(sorted(found))


@dataclass(frozen=True)
class Fixed:
    """These sets, one after the other: what a simulation runs."""

    sets: tuple[tuple[int, ...], ...]

    def at(self, period: int) -> tuple[int, ...]:
        return self.sets[period % len(self.sets)]


def permutation(seed: int, period: int, count: int) -> list[int]:
    """0 … count - 1 in the order of `count` random 32-bit words."""
    words = random_uint32(seed, PERMUTATION, 0, count, stream=period)
    keys = [read(word, expect=0.0) for word in words]
    return sorted(range(count), key=lambda index: (keys[index], index))


def inclusion(weights: Sequence[float], active: int) -> list[float]:
    """The share of the periods in which each block trains: active x weight / sum, none above 1.

    What a block would have above 1 goes to the others in proportion to their weights. A weight of 0 counts as a
    hundredth of the mean: no block is left out for ever.
    """
    floor = 0.01 * sum(weights) / len(weights) or 1.0
    raised = [max(w, floor) for w in weights]
    full: set[int] = set()
    while True:
        rest = sum(w for i, w in enumerate(raised) if i not in full)
        left = active - len(full)
        shares = [1.0 if i in full else left * w / rest for i, w in enumerate(raised)]
        above = {i for i, s in enumerate(shares) if s > 1.0 and i not in full}
        if not above:
            return shares
        full |= above


def costliest(count: int, active: int, through: bool, recomputed: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Sets of which one takes at least as much memory as any draw; what a plan simulates.

    A trained block adds its gradients from its backward on, and until then the inputs of its products. So the last
    blocks, first in backward, are the costliest: their gradients lie on top of all other activations. Where nothing
    below the blocks trains, backward ends at the lowest trained block and nothing below it is kept: then block 0 is
    one of the set. Recomputed blocks keep their inputs of products for a moment only, so with some of the blocks
    recomputed the first kept block, and the last recomputed one, are tried in place of a last one too. And a block that
    rests may need more room in its own backward than one that trains (a trained product of a fused layer adds to its
    gradient in place and makes its input again): the same sets without the very last block are tried as well.

    Args:
        count, active: blocks, and how many train.
        through: something below the blocks trains, so backward goes through all of them.
        recomputed: blocks that are recomputed.
    """
    kept = [i for i in range(count) if i not in recomputed]
    bottoms = [[]] if through else [[0]]
    if not through and recomputed and kept:
        bottoms.append([kept[0]])
    tops = [[]] if not recomputed or not kept else [[], [max(recomputed)]]
    found = []
    for bottom in bottoms:
        for top in tops:
            first = list(dict.fromkeys([*bottom, *top]))[:active]
            rest = [i for i in reversed(range(count)) if i not in first]
            found.append(tuple(sorted([*first, *rest[: active - len(first)]])))
            if active < count and rest[0] == count - 1:
                found.append(tuple(sorted([*first, *rest[1 : active - len(first) + 1]])))
    return tuple(dict.fromkeys(found))
