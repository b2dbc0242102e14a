"""Moves heads and channels so that chosen ones lie side by side; the model's function stays, and so does the way back.

All members of a structure move by one permutation: rows of up and gate (and their biases) with columns of down; whole
heads of q, k, v rows with columns of o. Rotary positions are the same in every head, the activation acts on each
channel alone, and a norm of queries or keys has one gain a position in the head, so nothing else notices. With grouped
queries key/value heads move with their groups, and inside a group query heads move freely. Sums of o and down run in
another order, so outputs agree to rounding; weights moved back are equal to the bit.

Order: only first, both, only second, rest. The first kind's units then lie at [0, …) and the second's side by side,
except query heads spread over more than two groups that are each tuned in part: no order joins those.

Paper: "S2FT", Yang et al., 2024, arXiv 2412.06289, section 3.3.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.coupled import Channels, Heads, Member, coupled
from skimp.adapters.targets import is_transposed
from skimp.core.errors import ModelError
from skimp.core.structure import Structure

#: A member and, for each of its numbers from its offset on, the original number that comes there.
Move = tuple[Member, tuple[int, ...]]


def channel_order(count: int, first: Collection[int], second: Collection[int]) -> list[int]:
    """Channels in the order: only in `first`, in both, only in `second`, the rest; each ascending."""
    one, two = set(first), set(second)
    return sorted(range(count), key=lambda c: (_place(c in one, c in two), c))


def head_order(heads: Heads, v: Collection[int], o: Collection[int]) -> tuple[list[int], list[int]]:
    """(query heads, key/value heads) in their new order.

    Args:
        v: key/value heads to bring together. o: query heads to bring together.
    """
    group, chosen, tuned = heads.count // heads.kv, set(v), set(o)
    members = {kv: range(kv * group, (kv + 1) * group) for kv in range(heads.kv)}
    inside = {kv: sum(q in tuned for q in members[kv]) for kv in members}

    def rank(kv: int) -> tuple[int, int, int]:
        # Groups of v first. Among these, the fuller of o the later; among the others, the fuller the earlier.
        return (0, inside[kv], kv) if kv in chosen else (1, -inside[kv], kv)

    groups = sorted(members, key=rank)
    order = []
    for kv in groups:
        last = kv in chosen
        order += sorted(members[kv], key=lambda q: ((q in tuned) == last if last else q not in tuned, q))
    return order, groups


def _place(first: bool, second: bool) -> int:
    return {(True, False): 0, (True, True): 1, (False, True): 2, (False, False): 3}[first, second]


def moves(model: nn.Module, structure: Structure, tuned: Mapping[str, Sequence[int]], heads: bool = True) -> list[Move]:
    """What has to move so that the tuned rows and columns of every layer lie side by side.

    Args:
        tuned: layer -> its tuned rows or columns (`Slice.index`). heads: move heads too.

    Raises:
        ModelError: heads that cannot be told apart, or something beside the projections that belongs to a head.
    """
    found: list[Move] = []
    for name, block in zip(structure.blocks, coupled(model, structure, heads), strict=True):
        for channels in block.channels:
            found += _channel_moves(channels, tuned)
        if block.heads is not None and {block.heads.v.module, block.heads.o.module} & set(tuned):
            _check_beside(model, name, block.heads)
            found += _head_moves(block.heads, tuned)
    return [move for move in found if list(move[1]) != sorted(move[1])]


def _channel_moves(channels: Channels, tuned: Mapping[str, Sequence[int]]) -> list[Move]:
    up = [at - channels.up.offset for at in tuned.get(channels.up.module, ())]
    order = channel_order(channels.count, up, tuned.get(channels.down.module, ()))
    return [(m, tuple(order)) for m in (*channels.inner, channels.down)]


def _head_moves(heads: Heads, tuned: Mapping[str, Sequence[int]]) -> list[Move]:
    v = {(at - heads.v.offset) // heads.size for at in tuned.get(heads.v.module, ())}
    o = {at // heads.size for at in tuned.get(heads.o.module, ())}
    queries, groups = head_order(heads, v, o)
    wide, narrow = (tuple(h * heads.size + i for h in order for i in range(heads.size)) for order in (queries, groups))
    return [(heads.q, wide), (heads.k, narrow), (heads.v, narrow), (heads.o, wide)]


def _check_beside(model: nn.Module, block: str, heads: Heads) -> None:
    """Whatever else attention holds must be the same for every head."""
    attention = heads.o.module.rpartition(".")[0]
    own = {m.module for m in (heads.q, heads.k, heads.v, heads.o)}
    for name, p in model.get_submodule(attention).named_parameters():
        if f"{attention}.{name}".rpartition(".")[0] not in own and p.numel() not in (1, heads.size):
            raise ModelError(
                f"moving the heads of {block}",
                f"{attention}.{name} of shape {tuple(p.shape)}",
                f"it is not one gain for each of the {heads.size} positions in a head, so it belongs to the heads",
                ["permute=false: the same slices where they are", "o=0 and v=0: channels alone"],
            )


@torch.no_grad()
def apply(model: nn.Module, moved: Sequence[Move], back: bool = False) -> None:
    """Move in place, one layer at a time; `back` undoes it to the bit. Scratch: one layer's weight."""
    for member, order in moved:
        module: Any = model.get_submodule(member.module)
        index = torch.tensor(order, device=module.weight.device)
        if back:
            index = torch.argsort(index)
        whole = module.weight.t() if is_transposed(module) else module.weight
        if member.side == "columns":
            whole.copy_(whole.index_select(1, index))
            continue
        _reorder(whole, member.offset, index)
        if module.bias is not None:
            _reorder(module.bias, member.offset, index)


def _reorder(tensor: Tensor, offset: int, index: Tensor) -> None:
    part = tensor[offset : offset + index.numel()]
    part.copy_(part.index_select(0, index))


def places(index: Sequence[int], member_moves: Sequence[Move], module: str) -> list[int]:
    """Where original numbers `index` of a layer are after its moves, in the order of `index`."""
    found = list(index)
    for member, order in member_moves:
        if member.module == module:
            new = {member.offset + old: member.offset + at for at, old in enumerate(order)}
            found = [new.get(at, at) for at in found]
    return found
