"""Coupled structures: which rows and columns of which layers belong to one head, or to one channel of an MLP.

A channel c of an MLP is row c of up and gate and column c of down. A head is rows of q, k, v and columns of o, as many
of each as the head is wide; with grouped queries one key/value head goes with heads / kv_heads query heads. Whoever
selects, permutes or prunes such units asks here for the layers and the ranges, fused projections included.

Paper: "S2FT", Yang et al., 2024, arXiv 2412.06289, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from skimp.adapters.targets import is_transposed
from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import ModelError
from skimp.core.structure import Structure

#: Fused projections that hold all queries, then all keys, then all values. Others interleave them head by head.
STACKED_QKV = ("gpt2", "phi3")


@dataclass(frozen=True)
class Member:
    """Rows `offset` and on of a layer's outputs, or its columns (its inputs), that belong to units in order."""

    module: str
    side: str
    offset: int = 0


@dataclass(frozen=True)
class Heads:
    """Attention of one block: `count` query heads and `kv` key/value heads of width `size` each."""

    q: Member
    k: Member
    v: Member
    o: Member
    count: int
    kv: int
    size: int


@dataclass(frozen=True)
class Channels:
    """One MLP: `count` channels. `inner` are the layers whose rows are channels (up, and gate where there is one)."""

    up: Member
    inner: tuple[Member, ...]
    down: Member
    count: int


@dataclass(frozen=True)
class Coupled:
    """The structures of one block; None where it was not asked for, empty where no MLP is known."""

    heads: Heads | None
    channels: tuple[Channels, ...]


def coupled(model: nn.Module, structure: Structure, heads: bool = True) -> list[Coupled]:
    """The coupled structures of every block.

    Args:
        heads: look for those of attention too.

    Raises:
        ModelError: rows and columns of attention cannot be told apart into heads.
    """
    return [
        Coupled(_heads(model, structure, block) if heads else None, tuple(_channels(model, structure, block)))
        for block in structure.blocks
    ]


def sizes_of(model: nn.Module, member: Member) -> tuple[int, int]:
    """(outputs, inputs) of a member's layer."""
    module: Any = model.get_submodule(member.module)
    first, second = module.weight.shape
    return (second, first) if is_transposed(module) else (first, second)


def _there(model: nn.Module, name: str) -> bool:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    return isinstance(module, (nn.Linear, CodedLinear)) or is_transposed(module)


def _named(structure: Structure, role: str) -> tuple[str, ...]:
    return structure.roles.get(role, ())


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _heads(model: nn.Module, s: Structure, block: str) -> Heads:
    fused = _named(s, "qkv")
    names = [*_named(s, "o"), *(n for n in _named(s, "c_proj") if fused and _parent(n) == _parent(fused[0]))]
    if len(names) != 1 or not _there(model, f"{block}.{names[0]}"):
        raise _unknown(s, block, f"{len(names)} output projections known by name")
    o = Member(f"{block}.{names[0]}", "columns")
    width, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    if fused:
        if len(fused) != 1:
            raise _unknown(s, block, f"fused projections {', '.join(fused)}")
        whole = f"{block}.{fused[0]}"
        q, k, v = (Member(whole, "rows", at) for at in (0, width, width + keys))
        stacked = s.family in STACKED_QKV
        outputs: tuple[int, ...] = (sizes_of(model, q)[0],)
        expected: tuple[int, ...] = (width + 2 * keys,)
    else:
        parts = [_named(s, role) for role in ("q", "k", "v")]
        if any(len(p) != 1 or not _there(model, f"{block}.{p[0]}") for p in parts):
            raise _unknown(s, block, "no linear layers for queries, keys and values each")
        q, k, v = (Member(f"{block}.{p[0]}", "rows") for p in parts)
        stacked, outputs, expected = True, tuple(sizes_of(model, m)[0] for m in (q, k, v)), (width, keys, keys)
    inputs = sizes_of(model, o)[1]
    if not stacked or s.heads % s.kv_heads or outputs != expected or inputs != width:
        raise _unknown(
            s,
            block,
            f"{s.heads} query and {s.kv_heads} key/value heads of width {s.head_dim}; {_parent(q.module)} has "
            f"{' + '.join(map(str, outputs))} outputs before {inputs} inputs of {o.module}"
            + ("" if stacked else f"; '{s.family}' fuses its projections in an order of its own"),
        )
    return Heads(q, k, v, o, s.heads, s.kv_heads, s.head_dim)


def _unknown(s: Structure, block: str, found: str) -> ModelError:
    return ModelError(
        f"the attention heads of {block} (model_type '{s.family}')",
        found,
        "rows and columns cannot be told apart into heads, so that none could be tuned or moved as one",
        ["o=0 and v=0: channels of the MLP alone (u, d)", "adapter=lora, which needs no heads"],
    )


def _channels(model: nn.Module, s: Structure, block: str) -> Iterator[Channels]:
    fused = _named(s, "qkv")
    attention = {_parent(fused[0])} if fused else set()
    downs = [*_named(s, "down"), *(n for n in _named(s, "c_proj") if _parent(n) not in attention)]
    for name in downs:
        if not _there(model, f"{block}.{name}"):
            continue
        near = [f"{block}.{n}" for role in ("up", "gate") for n in _named(s, role) if _parent(n) == _parent(name)]
        joined = [f"{block}.{n}" for n in _named(s, "gate_up") if _parent(n) == _parent(name)]
        down = Member(f"{block}.{name}", "columns")
        count = sizes_of(model, down)[1]
        if joined:
            inner = tuple(Member(joined[0], "rows", at) for at in (count, 0))
            outputs = {sizes_of(model, inner[0])[0] - count}
        else:
            inner = tuple(Member(n, "rows") for n in near)
            outputs = {sizes_of(model, m)[0] for m in inner}
        if inner and outputs == {count}:
            yield Channels(inner[0], inner, down, count)
