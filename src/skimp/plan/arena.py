"""One step's memory as an arena: an address for every tensor that is made and given back within the step.

In two levels, so that it can be solved: what is born and dies inside one block's forward, or one block's backward, is
placed by itself and becomes one request that lives as long as that stretch; blocks that ask for the same in the same
order share one solution. Then those requests are placed beside everything else. Two levels never take less than one
would; where every other tensor either outlives a stretch or misses it they take the same.

It is a plan and a measure, not an allocator: an arena holds for one sequence of requests, and a real step's is its
batch's. Packed rows attend document by document, so their requests differ from batch to batch; PyTorch has no place to
ask a plan for the address of an operator's inner buffers on a CPU. `Replayed` says what a step that keeps to the
sequence takes, and what it would take from elsewhere where it does not.

Paper: "MEMO: Fine-grained Tensor Management For Ultra-long Context LLM Training", Zhao et al., 2024, arXiv 2407.12117,
section 4.3 (bi-level memory planning).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skimp.core.errors import RecipeError
from skimp.core.memory.trace import Trace, replay
from skimp.core.units import format_bytes
from skimp.plan.addresses import SECONDS, Addresses, Request, floor, place
from skimp.plan.extend import block_of

#: Addresses are multiples of this: a card's allocator rounds to 512 bytes, a CPU's aligns to 64.
CARD_GRAIN, CPU_GRAIN = 512, 64


@dataclass(frozen=True)
class Stretch:
    """A block's forward or its backward: events from `begin` until before `end`."""

    begin: int
    end: int
    phase: str
    block: int


@dataclass(frozen=True)
class Step:
    """The requests of one step of a trace, the stretches of its blocks, and the bytes that it found and leaves."""

    requests: tuple[Request, ...]
    stretches: tuple[Stretch, ...]
    resting: int

    @classmethod
    def of(cls, trace: Trace, grain: int) -> Step:
        """From a trace of one step; sizes are rounded up to `grain`."""
        born: dict[int, tuple[int, int]] = {}
        found: list[Request] = []
        for index, (key, size) in enumerate(trace.events()):
            if size > 0:
                born[key] = (index, -(-size // grain) * grain)
                continue
            begin, nbytes = born.pop(key)
            if begin >= trace.step:
                found.append(Request(nbytes, begin, index))
        # What was there before the step, or is there after it, is not the arena's.
        return cls(tuple(found), tuple(_stretches(trace)), sum(size for _, size in born.values()))


def _stretches(trace: Trace) -> Iterator[Stretch]:
    """Runs of events of one block in one phase, from the step's begin on."""
    begin, now = trace.step, ("", -1)
    marks = [(at, *where) for at, where in zip(trace.starts, trace.places, strict=True)]
    for at, phase, owner in [*marks, (len(trace), "", "")]:
        block = block_of(owner)
        here = (phase, -1 if block is None else block)
        if here == now:
            continue
        if now[1] >= 0 and at > begin:
            yield Stretch(begin, at, *now)
        begin, now = max(at, trace.step), here


@dataclass(frozen=True)
class Arena:
    """Addresses of a step.

    Attributes:
        requests: of the step, with `offsets` in their order.
        height: bytes of the arena. floor: the most alive at once.
        local: requests that live within one block's forward or backward.
        solved: how many different stretches were solved, and how many of them have the least height there is.
        outer: the second level's addresses.
        resting: bytes beside the arena, which the step found and leaves.
        levels: 1 where all requests were placed at once after all.
    """

    requests: tuple[Request, ...]
    offsets: tuple[int, ...]
    height: int
    floor: int
    local: int
    solved: tuple[int, int]
    outer: Addresses
    resting: int
    levels: int = 2

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "height_bytes": self.height,
            "floor_bytes": self.floor,
            "resting_bytes": self.resting,
            "requests": len(self.requests),
            "local_requests": self.local,
            "stretches_solved": self.solved[0],
            "stretches_least": self.solved[1],
            "by": self.outer.by,
            "levels": self.levels,
            "least": self.height == self.floor,
        }


def arena(step: Step, seconds: float = SECONDS) -> Arena:
    """A step's requests in two levels, or all at once by greedy alone where that takes less: small models' do, whose
    stretches hold as much as what lives through them.

    Args:
        seconds: as `two_levels`.
    """
    two = two_levels(step, seconds)
    flat = None if two.height == two.floor else place(step.requests, 0, 0)
    if flat is None or flat.height >= two.height:
        return two
    return replace(two, offsets=flat.offsets, height=flat.height, outer=flat, levels=1)


def two_levels(step: Step, seconds: float = SECONDS) -> Arena:
    """Place a step's requests in two levels.

    Args:
        seconds: for each integer programme; 0: greedy alone.
    """
    inside: dict[int, list[int]] = {}
    outside: list[int] = []
    owners = _owners(step)
    for i, owner in enumerate(owners):
        inside.setdefault(owner, []).append(i) if owner >= 0 else outside.append(i)
    known: dict[tuple[Request, ...], Addresses] = {}
    pseudo: list[tuple[int, Addresses]] = []
    for owner, members in inside.items():
        begin = step.stretches[owner].begin
        shifted = tuple(Request(r.size, r.birth - begin, r.death - begin) for r in (step.requests[i] for i in members))
        if shifted not in known:
            known[shifted] = place(shifted, seconds)
        pseudo.append((owner, known[shifted]))
    outer = place(
        [step.requests[i] for i in outside]
        + [Request(a.height, step.stretches[o].begin, step.stretches[o].end) for o, a in pseudo],
        seconds,
    )
    offsets = [0] * len(step.requests)
    for i, at in zip(outside, outer.offsets[: len(outside)], strict=True):
        offsets[i] = at
    for (owner, found), base in zip(pseudo, outer.offsets[len(outside) :], strict=True):
        for i, at in zip(inside[owner], found.offsets, strict=True):
            offsets[i] = base + at
    return Arena(
        step.requests,
        tuple(offsets),
        outer.height,
        floor(step.requests),
        len(step.requests) - len(outside),
        (len(known), sum(found.least for found in known.values())),
        outer,
        step.resting,
    )


def _owners(step: Step) -> list[int]:
    """For each request the stretch that it lives and dies in, or -1."""
    at = 0
    order = sorted(range(len(step.requests)), key=lambda i: step.requests[i].birth)
    owners = [-1] * len(step.requests)
    for i in order:
        request = step.requests[i]
        while at < len(step.stretches) and step.stretches[at].end <= request.birth:
            at += 1
        if at < len(step.stretches):
            stretch = step.stretches[at]
            owners[i] = at if stretch.begin <= request.birth and request.death < stretch.end else -1
    return owners


@dataclass
class Replayed:
    """A step run through an arena: bytes taken from elsewhere, for what was not in the plan or lay on a live tensor."""

    elsewhere: int = 0
    misses: int = 0

    @classmethod
    def of(cls, plan: Arena, trace: Trace, grain: int, steps: int = 1) -> Replayed:
        """Run the step's events `steps` times against the plan, in the order of their births."""
        found = cls()
        births = {r.birth - trace.step: (r.size, at) for r, at in zip(plan.requests, plan.offsets, strict=True)}
        events = list(trace.events(trace.step))
        last = dict[int, int]()  # births that no release has followed yet: what stays is not the arena's
        for index, (key, size) in enumerate(events):
            if size > 0:
                last[key] = index
            else:
                last.pop(key, None)
        stays = set(last.values())
        for _ in range(steps):
            live: dict[int, tuple[int, int]] = {}
            for index, (key, size) in enumerate(events):
                if size < 0:
                    live.pop(key, None)
                    continue
                nbytes = -(-size // grain) * grain
                planned, at = births.get(index, (0, 0))
                if index in stays:
                    continue
                if planned != nbytes or any(b < at + nbytes and at < e for b, e in live.values()):
                    found.elsewhere += nbytes
                    found.misses += 1
                else:
                    live[key] = (at, at + nbytes)
        return found


def of_run(recipe: Any, config: dict[str, Any], exact: Any, where: Any) -> dict[str, Any]:
    """The arena of a planned run, beside what PyTorch's allocator reserves for the same step.

    Args:
        recipe, config, exact: as `simulate`; a card's recipe is one card's.
        where: `plan.places.Places`.

    Raises:
        RecipeError: several cards, whose step is known by formula and not by its requests.

    Returns:
        `Arena.as_dict` and `reserved_bytes` (a card; None on a CPU), plain JSON types.
    """
    from skimp.plan.simulate import simulate

    if where.count > 1:
        raise RecipeError(
            "skimp plan --arena",
            f"{where.count} cards by formula",
            "addresses are of one card's requests, and what its shards gather is not simulated",
            f"--gpu {where.card.name}: one card",
        )
    on_card = not where.on_cpu
    trace = Trace(where.card.workspace_bytes if on_card else 0)
    target = f"cuda:{where.card.capability}" if on_card else "cpu"
    simulate(recipe, exact, config, target=target, steps=1, micro_batches=2, short=True, evaluate=False, trace=trace)
    found = arena(Step.of(trace, CARD_GRAIN if on_card else CPU_GRAIN))
    reserved = replay(trace, steps=3).reserved if on_card else None
    return {**found.as_dict(), "reserved_bytes": reserved}


def sentences(found: Mapping[str, Any]) -> list[str]:
    """An arena in words."""
    height, bottom = found["height_bytes"], found["floor_bytes"]
    above = "no placement takes less" if height == bottom else f"{height / bottom - 1:.1%} above the most alive at once"
    said = [
        f"arena of one step: {found['requests']:,} tensors at fixed addresses in {format_bytes(height)}: {above}",
        f"{found['local_requests']:,} of them live within one block's forward or backward: "
        f"{found['stretches_solved']} kinds of stretch solved, {found['stretches_least']} with the least height; "
        f"around them by {found['by']}"
        if found["levels"] == 2
        else f"placed all at once, by {found['by']}: in two levels they would take more",
    ]
    if found["reserved_bytes"]:
        total, reserved = height + found["resting_bytes"], found["reserved_bytes"]
        less = f"{format_bytes(abs(reserved - total))} {'less' if reserved >= total else 'more'}"
        said.append(
            f"with the {format_bytes(found['resting_bytes'])} that rest beside it {format_bytes(total)}, {less} than "
            f"the {format_bytes(reserved)} that PyTorch's allocator reserves for the same step"
        )
    return said
