"""Batches of random tokens with stated documents, for simulation, calibration and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from skimp.core.batch import IGNORE, Batch
from skimp.core.errors import DataError


def synthetic_batch(
    seq_len: int,
    rows: int,
    vocab: int,
    documents: Sequence[int] | Literal["whole", "worst_packed"] | None = None,
    seed: int = 0,
) -> Batch:
    """A batch as the stream gives it, (rows, seq_len) int64 host tensors; the same numbers for the same
    arguments.

    Args:
        documents: offsets of every row's documents and the end; None or `whole` is one document a row,
            `worst_packed` is (0, seq_len - 1, seq_len): the longest document beside another, which costs
            attention most among rows that are packed.
    """
    if documents is None or documents == "whole":
        offsets: tuple[int, ...] = (0, seq_len)
    elif documents == "worst_packed":
        offsets = (0, seq_len - 1, seq_len)
    else:
        offsets = tuple(int(d) for d in documents)
    if offsets[0] != 0 or offsets[-1] != seq_len or any(a >= b for a, b in itertools.pairwise(offsets)):
        raise DataError(f"documents: offsets rising from 0 to {seq_len}", f"{offsets}")
    raw = np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64)).random_raw(rows * seq_len)
    ids = (raw % np.uint64(vocab)).astype(np.int64).reshape(rows, seq_len)
    labels = np.full_like(ids, IGNORE)
    labels[:, :-1] = ids[:, 1:]
    ends = np.array(offsets[1:]) - 1
    labels[:, ends] = IGNORE
    starts = np.repeat(np.array(offsets[:-1]), np.diff(offsets))
    positions = np.broadcast_to(np.arange(seq_len) - starts, ids.shape).copy()
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
        (offsets,) * rows,
        rows * (seq_len - len(ends)),
        source=torch.zeros(rows, dtype=torch.int64),
    )
