"""Addresses for tensors whose lives are known: the least height in which no two that live at once overlap.

Dynamic storage allocation, offline. `greedy` gives each in turn the lowest gap that holds it. Where the best of three
orders is not at the floor (the most bytes alive at once), `searched` builds placements from below, each request on top
of those it meets, and drops what cannot become lower than the best so far; it is exact where it comes to its end. What
is too much for it goes to an integer programme (HiGHS, where scipy is installed), which decides for every two that live
at once which lies below; the addresses follow from those decisions as whole numbers, whatever a solver rounds.

Paper: "MEMO: Fine-grained Tensor Management For Ultra-long Context LLM Training", Zhao et al., 2024, arXiv 2407.12117,
section 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from itertools import combinations

import numpy as np

#: Placements that the search looks at before it gives up, and requests beyond which it does not begin.
NODES, MANY = 20_000, 60
#: Pairs alive at once beyond which the integer programme is not tried: it would not end in seconds.
PAIRS = 600
#: Seconds it is given.
SECONDS = 10.0


@dataclass(frozen=True)
class Request:
    """`size` bytes from event `birth` on, until before event `death`."""

    size: int
    birth: int
    death: int

    def meets(self, other: Request) -> bool:
        """Whether both are alive at some moment."""
        return self.birth < other.death and other.birth < self.death


@dataclass(frozen=True)
class Addresses:
    """Where each request begins, in their order; the bytes that takes; whether no fewer would do; and how it was found.

    Attributes:
        floor: the most bytes alive at once: no placement is lower.
        by: "greedy", "search" or "integer programme".
    """

    offsets: tuple[int, ...]
    height: int
    floor: int
    least: bool
    by: str = "greedy"


def place(requests: Sequence[Request], seconds: float = SECONDS, nodes: int = NODES) -> Addresses:
    """Addresses of the least height that is found.

    Args:
        requests: sizes are whole multiples of what addresses must be multiples of.
        seconds: for the integer programme, where it is needed; 0 leaves it out.
        nodes: of the search; 0 leaves it out.
    """
    bottom = floor(requests)
    orders = (
        sorted(range(len(requests)), key=lambda i: (-requests[i].size, requests[i].birth)),
        sorted(range(len(requests)), key=lambda i: (requests[i].birth - requests[i].death, -requests[i].size)),
        sorted(range(len(requests)), key=lambda i: (requests[i].birth, -requests[i].size)),
    )
    best = min((greedy(requests, order) for order in orders), key=lambda found: height(requests, found))
    most, least, by = height(requests, best), False, "greedy"
    if most > bottom and nodes and len(requests) <= MANY:
        lower, least = searched(requests, bottom, most, nodes)
        if lower is not None:
            best, most, by = lower, height(requests, lower), "search"
    together = None if least or most == bottom or not seconds else _together(requests, PAIRS)
    if together is not None and find_spec("scipy") is not None:
        lower, least = _programme(requests, together, bottom, most, seconds)
        if lower is not None and height(requests, lower) < most:
            best, most, by = lower, height(requests, lower), "integer programme"
    return Addresses(tuple(best), most, bottom, least or most == bottom, by)


def searched(requests: Sequence[Request], bottom: int, most: int, nodes: int) -> tuple[list[int] | None, bool]:
    """(addresses lower than `most` or None, whether none are lower than those), by branch and bound.

    Any placement can be let down until each request lies at 0 or on one that it meets. Taken by ascending address, each
    then lies on the highest of those it meets among those before it: so the order is all there is to decide. At any
    moment the requests still to come that are alive then lie above all that is there, one on the other: the bound.

    Args:
        bottom: the floor; a placement that high ends the search.
        most: a height that is reached already.
        nodes: placements looked at.
    """
    count, moments = len(requests), sorted({r.birth for r in requests})
    alive = [[m for m, t in enumerate(moments) if r.birth <= t < r.death] for r in requests]
    waiting = [sum(r.size for i, r in enumerate(requests) if m in alive[i]) for m in range(len(moments))]
    top, offsets, free = [0] * len(moments), [0] * count, [True] * count
    best: list[int] | None = None
    left = nodes

    def descend(placed: int, last: int) -> None:
        nonlocal best, most, left
        if placed == count:
            best, most = offsets.copy(), height(requests, offsets)
            return
        tried = set[Request]()
        lying = sorted((max(top[m] for m in alive[i]), -requests[i].size, i) for i in range(count) if free[i])
        for at, _, i in lying:
            if at < last or requests[i] in tried or most <= bottom:
                continue
            tried.add(requests[i])
            left -= 1
            if left < 0:
                return
            size, before = requests[i].size, [top[m] for m in alive[i]]
            for m in alive[i]:
                top[m], waiting[m] = at + size, waiting[m] - size
            if all(high + rest < most for high, rest in zip(top, waiting, strict=True)):
                offsets[i], free[i] = at, False
                descend(placed + 1, at)
                free[i] = True
            for m, high in zip(alive[i], before, strict=True):
                top[m], waiting[m] = high, waiting[m] + size

    descend(0, 0)
    return best, left >= 0 or most <= bottom


def floor(requests: Sequence[Request]) -> int:
    """The most bytes alive at once."""
    # At one event the dying go before the living come: a free block may serve the next request.
    events = sorted([(r.birth, 1, r.size) for r in requests] + [(r.death, 0, -r.size) for r in requests])
    now = most = 0
    for _, _, size in events:
        now += size
        most = max(most, now)
    return most


def height(requests: Sequence[Request], offsets: Sequence[int]) -> int:
    """The end of the highest request."""
    return max((at + r.size for r, at in zip(requests, offsets, strict=True)), default=0)


def greedy(requests: Sequence[Request], order: Sequence[int]) -> list[int]:
    """Each request in this order at the lowest place that holds it beside those placed before it."""
    offsets = [0] * len(requests)
    births, deaths, begins, ends = np.zeros((4, len(requests)), dtype=np.int64)  # of those placed, in this order
    for placed, i in enumerate(order):
        now = requests[i]
        beside = np.flatnonzero((births[:placed] < now.death) & (deaths[:placed] > now.birth))
        at = 0
        for k in beside[np.argsort(begins[beside], kind="stable")]:
            if begins[k] - at >= now.size:
                break
            at = max(at, int(ends[k]))
        offsets[i] = at
        births[placed], deaths[placed], begins[placed], ends[placed] = now.birth, now.death, at, at + now.size
    return offsets


def _together(requests: Sequence[Request], most: int) -> list[tuple[int, int]] | None:
    """Every two requests that live at once; None where they are more than `most`."""
    found: list[tuple[int, int]] = []
    alive: list[int] = []
    for i in sorted(range(len(requests)), key=lambda i: requests[i].birth):
        alive = [j for j in alive if requests[j].death > requests[i].birth]
        found += ((j, i) for j in alive)
        if len(found) > most:
            return None
        alive.append(i)
    return found


def overlapping(requests: Sequence[Request], offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Every two requests that live at once and share an address: none, of a right placement."""
    return [
        (i, j)
        for i, j in combinations(range(len(requests)), 2)
        if requests[i].meets(requests[j])
        and offsets[i] < offsets[j] + requests[j].size
        and offsets[j] < offsets[i] + requests[i].size
    ]


def _programme(
    requests: Sequence[Request], together: Sequence[tuple[int, int]], bottom: int, most: int, seconds: float
) -> tuple[list[int] | None, bool]:
    """(addresses or None, whether no lower ones exist), by the integer programme.

    Unknowns: an address A of each, the height M, and of each pair z = 1 where i lies above j.
    minimise M; A_i + S_i <= M; A_i + S_i <= A_j + z H; A_j + S_j <= A_i + (1 - z) H; with H the greedy height.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    count, last = len(requests), len(requests)
    # In units of the greedy height, so that the solver's tolerances mean the same for kilobytes and gigabytes.
    sizes = [r.size / most for r in requests]
    total = count + 1 + len(together)
    rows: list[tuple[dict[int, float], float]] = [({i: 1.0, last: -1.0}, -sizes[i]) for i in range(count)]
    for k, (i, j) in enumerate(together):
        z = count + 1 + k
        rows.append(({i: 1.0, j: -1.0, z: -1.0}, -sizes[i]))
        rows.append(({j: 1.0, i: -1.0, z: 1.0}, 1.0 - sizes[j]))
    entries = [(row, column, value) for row, (left, _) in enumerate(rows) for column, value in left.items()]
    table = coo_array(
        ([v for _, _, v in entries], ([r for r, _, _ in entries], [c for _, c, _ in entries])), (len(rows), total)
    )
    cost, whole = np.zeros(total), np.zeros(total)
    cost[last], whole[count + 1 :] = 1.0, 1.0
    low, high = np.zeros(total), np.ones(total)
    low[last] = bottom / most
    answer = milp(
        cost,
        constraints=LinearConstraint(table.tocsr(), -np.inf, np.array([right for _, right in rows])),
        bounds=Bounds(low, high),
        integrality=whole,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if answer.x is None:
        return None, False
    below: list[list[int]] = [[] for _ in range(count)]
    for k, (i, j) in enumerate(together):
        above, under = (i, j) if answer.x[count + 1 + k] > 0.5 else (j, i)
        below[above].append(under)
    return _stacked(requests, below), answer.status == 0


def _stacked(requests: Sequence[Request], below: Sequence[Sequence[int]]) -> list[int] | None:
    """Each request right above the highest of those below it: whole addresses from the solver's decisions alone. None
    where they go round in a circle, as tolerances may let the smallest of sizes do."""
    offsets = [0] * len(requests)
    try:
        for i in TopologicalSorter(dict(enumerate(below))).static_order():
            offsets[i] = max((offsets[j] + requests[j].size for j in below[i]), default=0)
    except CycleError:
        return None
    return offsets
