"""Memory against time: every point of the lattice that nothing beats in both, and what each decision of a plan does.

The frontier walks the whole lattice whatever the budget, so it answers what a larger card, or a smaller one, would buy.
A decision is explained by the point that differs in it alone: what that would take, and how long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from skimp.core.exact import ExactChoices
from skimp.core.units import format_bytes
from skimp.plan.mixed import MixedSearch, plain
from skimp.plan.places import Places
from skimp.plan.search import Candidate

#: Points nearer than such a part of the whole frontier's bytes get no mixtures between them.
FINEST = 50


@dataclass(frozen=True)
class Point:
    """A run: its exact choices, the bytes that a budget is compared with, the seconds of a step."""

    exact: ExactChoices
    peak_bytes: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"chosen": self.exact.as_dict(), "peak_bytes": self.peak_bytes, "seconds": self.seconds}


@dataclass(frozen=True)
class Decision:
    """One decision of a plan against one other value of it, all else equal.

    Attributes:
        what, chosen, instead: the key of `exact:`, its value and the other one.
        saved_bytes, cost_seconds: what the chosen value saves and costs against the other; negative the other way.
    """

    what: str
    chosen: str
    instead: str
    saved_bytes: int
    cost_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(vars(self))


def frontier(search: MixedSearch, where: Places, more: int = 0, beside: Sequence[Candidate] = ()) -> tuple[Point, ...]:
    """The undominated points of the whole lattice, least memory first; on a card its allocator takes `more` bytes.

    Args:
        beside: points outside the lattice that a search came upon for its own budget, with things that wait elsewhere.
    """
    pinned = search.pinned_count()
    counts = range(search.blocks + 1) if pinned is None else (pinned,)
    words_pinned = isinstance(search.recipe.exact.keep, tuple)
    found: list[Candidate] = search.candidates() if words_pinned else []
    for row in () if words_pinned else search.lattice.everywhere():
        for policy in search.budgets:
            if policy != "reuse" or search.reusable(row):
                # With nothing recomputed, what recomputed blocks keep makes no difference.
                found += [search.point(row, policy, n) for n in counts if n or row == replace(row, keep="nothing")]
    kept = _undominated(found, where)
    if pinned is None and search.recipe.train.layers is None:
        kept = _undominated([*kept, *_between(search, kept)], where)
    kept = _undominated([*kept, *beside], where)
    return tuple(Point(c.exact, _compared(where, c) + more, c.seconds) for c in kept)


def _undominated(found: Sequence[Candidate], where: Places) -> list[Candidate]:
    """Those that nothing beats in both bytes and seconds, least memory first."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (_compared(where, c), c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return kept


def _between(search: MixedSearch, kept: Sequence[Candidate]) -> Iterator[Candidate]:
    """The fastest mixtures that take less than a point of the frontier, in its row and in that of the next smaller."""
    least = (kept[-1].peak - kept[0].peak) // FINEST if kept else 0
    for smaller, larger in pairwise(kept):
        if larger.peak - smaller.peak < least:
            continue  # nothing that a picture would show lies between them
        for row, policy in dict.fromkeys((plain(c.exact), c.exact.malloc) for c in (smaller, larger)):
            found = search.mixture(row, policy, search.budgets[policy][0] - larger.peak + 1)
            if found is not None:
                yield found


def explain(search: MixedSearch, exact: ExactChoices, where: Places) -> tuple[Decision, ...]:
    """Every decision the plan was free to take, against each other value of it."""
    exact = replace(exact, offload=())
    row, count = plain(exact), len(exact.recompute)
    mine = search.at(exact)

    def against(what: str, chosen: object, instead: object, other: Candidate) -> Decision:
        saved = _compared(where, other) - _compared(where, mine)
        return Decision(what, str(chosen), str(instead), saved, mine.seconds - other.seconds)

    def others() -> Iterator[Decision]:
        if search.pinned_count() is None:
            for n in sorted({0, search.blocks} - {count}):
                keep = exact.keep if isinstance(exact.keep, str) else "nothing"
                other = search.at(replace(exact, recompute=tuple(range(n)), keep=keep))
                yield against("recompute", count, n, other)
        for rows in _near(search.lattice.sizes(), exact.micro_rows):
            if not exact.in_backward:
                other = search.at(replace(exact, micro_rows=rows))
                yield against("micro_batch", exact.micro_rows, rows, other)
        for axis in search.lattice.axes:
            faster, own, less = search.lattice.values(axis, search.lattice.root(row))
            chosen = getattr(exact, axis.name)
            for value in (*faster[::-1], own, *less) if axis.touches != "recomputed" or count else ():
                if value != chosen:
                    other = search.at(replace(exact, **{axis.name: value}))
                    yield against(axis.name, _said(axis.name, chosen), _said(axis.name, value), other)
        if search.recipe.exact.in_backward is None and exact.micro_rows == search.recipe.rows_per_step:
            other = search.at(replace(exact, in_backward=not exact.in_backward))
            ours, theirs = str(exact.in_backward).lower(), str(not exact.in_backward).lower()
            yield against("in_backward", ours, theirs, other)
        for policy in search.budgets:
            if policy != exact.malloc:
                yield against("malloc", exact.malloc, policy, search.at(replace(exact, malloc=policy)))

    return tuple(others())


def sentence(decision: Decision) -> str:
    """'recompute 5, not 0: saves 0.4 GB, costs 0.31 s a step' for a person."""
    size, seconds = decision.saved_bytes, decision.cost_seconds
    bytes_ = f"{'saves' if size >= 0 else 'takes'} {format_bytes(abs(size))}{'' if size >= 0 else ' more'}"
    time = f"{'costs' if seconds >= 0 else 'spares'} {abs(seconds):.3g} s a step"
    return f"{decision.what} {decision.chosen}, not {decision.instead}: {bytes_}, {time}"


def _near(sizes: Sequence[int], size: int) -> list[int]:
    """The sizes beside one."""
    at = list(sizes).index(size)
    return [sizes[i] for i in (at - 1, at + 1) if 0 <= i < len(sizes)]


def _said(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return "mixed"
    none = "all tokens" if name == "mlp_chunk" else "its own rule"
    return none if value is None else str(value)


def _compared(where: Places, candidate: Candidate) -> int:
    return where.resident_peak(candidate.peak, candidate.exact.malloc) if where.on_cpu else candidate.peak
