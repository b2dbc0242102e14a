"""Attention behind a prefix: keys and values before the text that every position of every document sees.

The prefix stands before each document as so many more positions, whose own outputs are dropped: their queries are 0,
and no mask is needed. Over a cache, which holds the text alone, it comes before all of the past.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def prefixed(
    prefix: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: tuple[tuple[int, ...], ...] | None,
    call: Call,
) -> Tensor:
    """`call` with the prefix before each document.

    Args:
        prefix: keys and values, each (1, key heads, length, dim).
        query, key, value: (rows, heads, seq, dim). documents: boundaries of each row, None where each is one document.
        call: attention of one document a row, causal, the last queries at the last keys; (rows, seq, heads, dim) out.
    """
    seq = query.shape[2]
    if documents is None or all(d == (0, seq) for d in documents):
        return _one(prefix, query, key, value, call)
    out = []
    for row, ends in enumerate(documents):
        cuts = [(slice(row, row + 1), slice(None), slice(a, b)) for a, b in pairwise(ends)]
        out.append(torch.cat([_one(prefix, query[c], key[c], value[c], call) for c in cuts], 1))
    return torch.cat(out, 0)


def _one(prefix: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    rows, heads, seq, dim = query.shape
    length = prefix[0].shape[2]
    keys, values = (
        torch.cat([p.to(t.dtype).expand(rows, -1, -1, -1), t], 2) for p, t in zip(prefix, (key, value), strict=True)
    )
    if seq != key.shape[2]:
        return call(query, keys, values)  # over a cache: the queries are the last positions as they were
    before = query.new_zeros(rows, heads, length, dim)
    return call(torch.cat([before, query], 2), keys, values)[:, length:]
