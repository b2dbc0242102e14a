"""States of an update rule outside the computing memory: on disk, or in the host's memory beside the CPU's own update.

Saves the bytes of all states but one parameter's (of an element-wise rule 16 MiB of them); costs their way in and out
once a step. Every rule can do it, because each updates one parameter at a time: the arithmetic and its order are those
of states that never left, so the run is the same to the bit.

Papers: "ZeRO-Offload: Democratizing Billion-Scale Model Training", Ren et al., 2021, arXiv 2101.06840 (states and their
update on the host); "ZeRO-Infinity", Rajbhandari et al., 2021, arXiv 2104.07857, section 5 (states on disk, streamed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from skimp.core.away import Away, region_bytes, state_nbytes
from skimp.core.errors import SkimpError
from skimp.core.read import read
from skimp.core.sharded import Part, is_sharded, local
from skimp.optim.state import entry, state_key

if TYPE_CHECKING:
    from skimp.optim.base import UpdateRule


#: Bytes of states that an update of a row-wise part opens at once.
TILE = 16 << 20
#: Numbers that vector kernels take together, at most: a cache line of bytes.
TOGETHER = 64


def made(rule: UpdateRule, p: Tensor) -> dict[str, Tensor] | None:
    """Zeros for the state of `p` where the rule's states live; None for beside it."""
    if rule.away is None:
        return None
    spec = rule.spec_of(p)
    rows = rows_at_once(rule, p)
    at_once = sum(state_nbytes(*one) for one in spec.values()) * rows // p.shape[0] if rows else 0
    tensors = rule.away.make(rule.name_of(p), list(spec.values()), p, at_once)
    return None if tensors is None else dict(zip(spec, tensors, strict=True))


def at_hand(rule: UpdateRule, p: Tensor) -> AbstractContextManager[None]:
    """The state of `p` can be read and written inside, wherever it lives."""
    return nullcontext() if rule.away is None else rule.away.open(rule.name_of(p))


def parts(
    rule: UpdateRule, p: Tensor, grad: Tensor, state: dict[str, Any]
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], Part]]:
    """(parameter, gradient, state, which part) to update one after the other, each with its state at hand.

    One part, all of it, wherever the state is in memory already, or cannot be cut.
    """
    away, name = rule.away, rule.name_of(p)
    whole = Part(name, p.numel(), 0, name)
    if away is None or not away.holds(name):
        yield p, grad.contiguous(), state, whole
        return
    rows = rows_at_once(rule, p)
    if not rows:
        with beside(rule, p, grad) as (own, given):
            yield own, given.contiguous(), state, whole
        return
    grad = grad.contiguous()
    for first, cut in _tiles(rule, p, state, rows):
        with away.open(name, [v for v in cut.values() if isinstance(v, Tensor)]):
            start = first * p[0].numel()
            yield p[first : first + rows], grad[first : first + rows], cut, Part(name, p.numel(), start, name)


def any_nonzero(rule: UpdateRule, p: Tensor, key: str) -> bool:
    """Whether a state has a number that is not 0, a part at a time."""
    state, away, rows = rule.state[p], rule.away, rows_at_once(rule, p)
    if away is None or not rows:
        with at_hand(rule, p):
            return read(local(state[key]).count_nonzero(), expect=1.0) > 0
    for _, cut in _tiles(rule, p, state, rows):
        with away.open(rule.name_of(p), [cut[key]]):
            if read(cut[key].count_nonzero(), expect=1.0) > 0:
                return True
    return False


def filled(rule: UpdateRule, p: Tensor, saved: Mapping[str, Any]) -> bool:
    """Read the state of `p` straight to where it lives, beside it or elsewhere, a piece at a time: there is never a
    second copy. False where `saved` is no file, or `p` is sharded.

    Raises:
        CheckpointError: an entry is missing, or is another tensor than this rule's.
    """
    fill, away, name = getattr(saved, "fill", None), rule.away, rule.name_of(p)
    if fill is None or is_sharded(p):
        return False
    state = rule.init_state(p)
    passed = (lambda piece: away.give_back([piece])) if away is not None and away.holds(name) else None
    state.update({key: int(entry(saved, state_key(name, key), rule.rule)) for key in rule.numbers_of(p)})
    for key in rule.spec_of(p):
        if state_key(name, key) not in saved:
            entry(saved, state_key(name, key), rule.rule)
        fill(state_key(name, key), state[key], passed)
    return True


def rows_at_once(rule: UpdateRule, p: Tensor) -> int:
    """Rows of `p` whose states make up a tile; 0 where the state is not cut.

    Only what is updated element by element can be: a part is then what a shard of rows is. Blocks of coded states are
    never cut in two, nor what a kernel takes at once: it rounds the numbers left over at the end another way.
    """
    away = rule.away
    if away is None or not away.visits or rule.locality_of(p) != "element" or p.dim() < 2 or is_sharded(p):
        return 0
    spec, columns, block = rule.spec_of(p), p[0].numel(), rule.block_of(p)
    blocks = (-(-p.numel() // block),)
    if rule.numbers_of(p) != ("step",) or any(shape not in (tuple(p.shape), blocks) for shape, _ in spec.values()):
        return 0
    whole = sum(state_nbytes(*one) for one in spec.values())
    unit = lcm(block, TOGETHER)
    step = unit // gcd(unit, columns)
    rows = max(1, TILE * p.shape[0] // whole // step) * step
    return rows if rows < p.shape[0] else 0


def _tiles(rule: UpdateRule, p: Tensor, state: dict[str, Any], rows: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(first row, state of `rows` rows from there on)."""
    columns, block = p[0].numel(), rule.block_of(p)
    for first in range(0, p.shape[0], rows):
        last = min(first + rows, p.shape[0])
        cut = dict(state)
        for key, (shape, _) in rule.spec_of(p).items():
            by_rows = shape == tuple(p.shape)
            at = slice(first, last) if by_rows else slice(first * columns // block, -(-last * columns // block))
            cut[key] = state[key][at]
        yield first, cut


@contextmanager
def beside(rule: UpdateRule, p: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameter and gradient where the state of `p` is, for one update; afterwards `p` is what was updated."""
    away, name = rule.away, rule.name_of(p)
    assert away is not None
    with away.open(name):
        own, given = away.beside(name, p, grad)
        if own is p:
            yield own, given
            return
        rule._where[own] = rule._where[p]  # the rule may ask for its group and name
        try:
            yield own, given
        finally:
            rule._where.pop(own, None)
        away.returned(name, p)


@torch.no_grad()
def keep_states(rule: UpdateRule, away: Away | None) -> None:
    """The rule's states live in `away` from now on, those that exist and those to come; None: beside their parameters.

    One parameter's are moved at a time, and the numbers stay the same to the bit.

    Raises:
        SkimpError: sharded parameters. OSError: no room there.
    """
    sharded = next((p for p in rule.parameters() if is_sharded(p)), None)
    if away is not None and sharded is not None:
        raise SkimpError(
            f"{rule.rule}: states on {away.place}",
            f"'{rule.name_of(sharded)}' is sharded over processes",
            "the state of a shard is placed by the mesh it is on",
            "fully_shard(…, offload_policy=CPUOffloadPolicy()), which moves parameter and state together",
        )
    if away is not None:
        try:
            away.reserve(sum(region_bytes(list(rule.spec_of(p).values())) for p in rule.parameters()))
        except OSError:
            away.close()  # what it got of a full disk goes back at once
            raise
    before, rule.away = rule.away, away
    for p in rule.parameters():
        if p not in rule.state:
            continue
        name, state, moved = rule.name_of(p), rule.state[p], made(rule, p)
        with nullcontext() if before is None else before.open(name), at_hand(rule, p):
            if moved is None:
                moved = {key: torch.empty_like(state[key], device=p.device) for key in rule.spec_of(p)}
            for key, tensor in moved.items():
                tensor.copy_(state[key])
        state.update(moved)
    if before is not None:
        before.close()
