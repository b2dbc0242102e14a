"""Which heads and channels S2FT tunes: budgets, random draws and scores.

`random` draws over all blocks at once: floor(budget x units x blocks) units, each set as likely, so blocks get unlike
numbers and some may get none (as the released code does). Every other rule ranks within a block and takes
floor(budget x units) in each: scores of different blocks are on different scales. The unit of o is a query head, that
of v a key/value head, that of u and d a channel.

A draw is a function of (seed, kind) alone: simulated and real runs tune the same units. What was chosen is stored with
the adapter all the same: another version's draw would be another adapter.

Paper: "S2FT", Yang et al., 2024, arXiv 2412.06289, section 3.2.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from skimp.adapters.coupled import Member, coupled
from skimp.adapters.partial_linear import Side
from skimp.adapters.targets import is_transposed
from skimp.core.coded import Coded
from skimp.core.errors import SkimpError
from skimp.core.noise import random_uint32
from skimp.core.read import is_simulated
from skimp.core.structure import Structure

Kind = Literal["v", "o", "u", "d"]
KINDS: tuple[Kind, ...] = ("v", "o", "u", "d")
Select = Literal["random", "weight", "activation", "product", "gradient"]
#: Rules that need text.
MEASURED = ("activation", "product", "gradient")
#: What a budget counts, in words.
UNITS = {"v": "key/value heads", "o": "query heads", "u": "channels of up", "d": "channels of down"}


@dataclass(frozen=True)
class Slice:
    """What one layer trains: rows or columns `index`, numbers of the original order, each once."""

    side: Side
    index: tuple[int, ...]


@dataclass(frozen=True)
class Units:
    """Units of one kind in one layer: `count` of `size` neighbouring rows or columns each."""

    member: Member
    count: int
    size: int

    def numbers(self, units: Collection[int]) -> tuple[int, ...]:
        """Rows or columns of these units, ascending."""
        starts = (self.member.offset + u * self.size for u in sorted(units))
        return tuple(at for start in starts for at in range(start, start + self.size))


@dataclass(frozen=True)
class S2FTSpec:
    """What S2FT tunes.

    Attributes:
        v, o: shares of the heads whose rows of v, columns of o, train. u, d: shares of the channels whose rows of up,
            columns of down, train.
        select: random, or by the norms of the weights, of the activations, of both multiplied, of the gradients.
        smallest: take the lowest scores, not the highest.
        permute: move what is tuned together, each head and channel as a whole (`adapters.permute`). The function of the
            model stays, to rounding; slices drawn at random are ranges then.
        seed: of the draw.
        batches: steps' rows of a run's text that scores are measured on.
        slices: layer -> what it trains, when that is known; nothing is drawn then.
    """

    v: float = 0.0
    o: float = 0.0
    u: float = 0.0
    d: float = 0.0
    select: Select = "random"
    smallest: bool = False
    permute: bool = False
    seed: int = 0
    batches: int = 4
    slices: Mapping[str, Slice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [f"{k}={getattr(self, k)}" for k in KINDS if not 0.0 <= getattr(self, k) <= 1.0]
        if wrong or not any(getattr(self, k) for k in KINDS):
            raise SkimpError(
                "S2FT on shares v, o of the heads and u, d of the channels",
                ", ".join(wrong) if wrong else "all are 0",
                "shares are from 0 to 1, and nothing would train" if not wrong else "shares are from 0 to 1",
                "o=0.05, d=0.02: about 1 % of a Llama's parameters",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        plain = {k: getattr(self, k) for k in (*KINDS, "select", "smallest", "permute", "seed", "batches")}
        return {**plain, "slices": {name: [s.side, list(s.index)] for name, s in self.slices.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> S2FTSpec:
        """A spec as a checkpoint keeps it."""
        slices = {name: Slice(side, tuple(index)) for name, (side, index) in values["slices"].items()}
        return cls(**{**values, "slices": slices})


def units_of(model: nn.Module, structure: Structure, kinds: Collection[str] = KINDS) -> dict[str, list[list[Units]]]:
    """Kind -> for every block its layers' units.

    Raises:
        ModelError: heads were asked for and cannot be told apart.
    """
    found: dict[str, list[list[Units]]] = {kind: [] for kind in kinds}
    for block in coupled(model, structure, heads="v" in kinds or "o" in kinds):
        h = block.heads
        here = {
            "v": [] if h is None else [Units(h.v, h.kv, h.size)],
            "o": [] if h is None else [Units(h.o, h.count, h.size)],
            "u": [Units(c.up, c.count, 1) for c in block.channels],
            "d": [Units(c.down, c.count, 1) for c in block.channels],
        }
        for kind in kinds:
            found[kind].append(here[kind])
    return found


def choose(
    model: nn.Module,
    structure: Structure,
    spec: S2FTSpec,
    scores: Mapping[str, Tensor] | None = None,
    avoid: Sequence[Mapping[str, Slice]] = (),
    waits: bool = False,
) -> dict[str, Slice]:
    """Layer -> what it trains, in the model's order; layers with nothing are left out.

    Args:
        scores: layer -> one score a unit, for `activation`, `product` and `gradient` (`adapters.s2ft_scores`).
        avoid: slices of other adapters, which this one must not touch, so that they can be fused.
        waits: such scores come later; any units stand for those to be chosen, as many in each layer.

    Raises:
        SkimpError: a budget so small that it selects nothing, or that `avoid` leaves too little for.
    """
    kinds = [k for k in KINDS if getattr(spec, k) > 0.0]
    taken = {(name, at) for other in avoid for name, s in other.items() for at in s.index}
    found: dict[str, Slice] = {}
    for kind, blocks in units_of(model, structure, kinds).items():
        layers = [units for block in blocks for units in block]
        chosen = _chosen(model, spec, kind, layers, scores, taken, waits)
        for units, those in zip(layers, chosen, strict=True):
            if those:
                side: Side = "columns" if units.member.side == "columns" else "rows"
                found[units.member.module] = Slice(side, units.numbers(those))
    order = [name for name, _ in model.named_modules() if name in found]
    return {name: found[name] for name in order}


def _chosen(
    model: nn.Module,
    spec: S2FTSpec,
    kind: str,
    layers: list[Units],
    scores: Mapping[str, Tensor] | None,
    taken: Collection[tuple[str, int]],
    waits: bool,
) -> list[list[int]]:
    """For every layer the units that train."""
    share = getattr(spec, kind)
    total = sum(units.count for units in layers)
    if total == 0:
        raise SkimpError(f"adapter.{kind}={share:g}", "no MLP with rows of up and columns of down", "", f"{kind}=0")
    free = [_free(units, taken) for units in layers]
    if spec.select == "random":
        wanted = _floor(share * total)
        _enough(kind, share, wanted, total, sum(map(len, free)), "in all")
        ends = list(accumulate(units.count for units in layers))
        starts, allowed = [0, *ends], [set(units) for units in free]
        picked: list[list[int]] = [[] for _ in layers]
        for number in drawn(spec.seed, f"s2ft.{kind}", total):
            layer = bisect_right(ends, number)
            if wanted > 0 and number - starts[layer] in allowed[layer]:
                picked[layer].append(number - starts[layer])
                wanted -= 1
        return [sorted(those) for those in picked]
    chosen = []
    for units, units_free in zip(layers, free, strict=True):
        wanted = _floor(share * units.count)
        _enough(kind, share, wanted, units.count, len(units_free), f"in {units.member.module}")
        stand_in = waits and spec.select in MEASURED
        best = _apart(units_free) if stand_in else _best(model, spec, units, units_free, scores)
        chosen.append(sorted(best[:wanted]))
    return chosen


def _free(units: Units, taken: Collection[tuple[str, int]]) -> list[int]:
    """Units of which no row or column is another adapter's."""
    if not taken:
        return list(range(units.count))
    module = units.member.module
    return [u for u in range(units.count) if not any((module, at) in taken for at in units.numbers([u]))]


def _floor(count: float) -> int:
    """0.29 x 100 is 28.999999999999996 in floating point and 29 to whoever wrote it."""
    return math.floor(count + 1e-6)


def _enough(kind: str, share: float, wanted: int, total: int, free: int, where: str) -> None:
    if wanted == 0:
        raise SkimpError(
            f"adapter.{kind}={share:g}",
            f"0 of {total} {UNITS[kind]} {where}",
            "a share is rounded down, and nothing would train",
            [f"{kind}={math.ceil(1e4 / total) / 1e4:g}: one of them", f"{kind}=0"],
        )
    if wanted > free:
        raise SkimpError(
            f"adapter.{kind}={share:g}: {wanted} of {total} {UNITS[kind]} {where}",
            f"{free} that no other adapter tunes",
            "adapters that share a slice would add up in it when fused",
            f"{kind}={free / total:g} at most",
        )


def drawn(seed: int, name: str, count: int) -> list[int]:
    """0 … count - 1 in the order of `count` random words at (seed, name); real numbers also while simulating."""
    with unset_fake_temporarily():
        words = random_uint32(seed, name, 0, count).numpy()
    return [int(i) for i in np.argsort(words, kind="stable")]


def _apart(free: list[int]) -> list[int]:
    """Units no two of which need be neighbours, where it is not known which are best."""
    return [*free[::2], *free[1::2]]


def _best(
    model: nn.Module, spec: S2FTSpec, units: Units, free: list[int], scores: Mapping[str, Tensor] | None
) -> list[int]:
    """Free units, best first; without values (simulated) any: their number is what counts, and that they are apart."""
    name = units.member.module
    if spec.select in MEASURED and (scores is None or name not in scores):
        raise SkimpError(
            f"select={spec.select}",
            f"no scores of {name}",
            "they are measured on a few batches of text",
            ["select=random or select=weight", "from Python: S2FT(model, spec, scores=measured(model, spec, batches))"],
        )
    if is_simulated(next(model.parameters())):
        return _apart(free)
    found = weight_norms(model, units) if spec.select == "weight" else (scores or {})[name]
    values = found.detach().double().cpu().numpy()
    return sorted(free, key=lambda u: (values[u] if spec.smallest else -values[u], u))


@torch.no_grad()
def weight_norms(model: nn.Module, units: Units) -> Tensor:
    """(count,) the L2 norm of every unit's rows or columns."""
    module: Any = model.get_submodule(units.member.module)
    base = module.weight.dense(torch.float32) if isinstance(module.weight, Coded) else module.weight
    whole = base.t() if is_transposed(module) else base
    along = whole.t() if units.member.side == "columns" else whole
    first = units.member.offset
    rows: Tensor = along[first : first + units.count * units.size].float()
    # Norms of rows first: squares of every number would be a second matrix.
    lengths = torch.linalg.vector_norm(rows, dim=1).view(units.count, units.size)
    found: Tensor = torch.linalg.vector_norm(lengths, dim=1)
    return found
