"""States of an update rule outside the computing memory: on disk, or in the host's memory beside the CPU's own update.

Saves the bytes of all states but one parameter's; costs their way in and out once a step. Every rule can do it, because
each updates one parameter at a time: the arithmetic and its order are those of states that never left, so the run is
the same to the bit.

Papers: "ZeRO-Offload: Democratizing Billion-Scale Model Training", Ren et al., 2021, arXiv 2101.06840 (states and their
update on the host); "ZeRO-Infinity", Rajbhandari et al., 2021, arXiv 2104.07857, section 5 (states on disk, streamed).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skimp.core.away import Away, region_bytes
from skimp.core.errors import SkimpError
from skimp.core.sharded import is_sharded

if TYPE_CHECKING:
    from skimp.optim.base import UpdateRule


def made(rule: UpdateRule, p: Tensor) -> dict[str, Tensor] | None:
    """Zeros for the state of `p` where the rule's states live; None for beside it."""
    if rule.away is None:
        return None
    spec = rule.spec_of(p)
    tensors = rule.away.make(rule.name_of(p), list(spec.values()), p)
    return None if tensors is None else dict(zip(spec, tensors, strict=True))


def at_hand(rule: UpdateRule, p: Tensor) -> AbstractContextManager[None]:
    """The state of `p` can be read and written inside, wherever it lives."""
    return nullcontext() if rule.away is None else rule.away.open(rule.name_of(p))


@contextmanager
def beside(rule: UpdateRule, p: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameter and gradient where the state of `p` is, for one update; afterwards `p` is what was updated."""
    away, name = rule.away, rule.name_of(p)
    if away is None or not away.holds(name):
        yield p, grad
        return
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
        away.reserve(sum(region_bytes(list(rule.spec_of(p).values())) for p in rule.parameters()))
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
