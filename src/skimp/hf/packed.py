"""Rows for a trainer, packed by skimp's rules: every row full, no attention across documents, fresh positions.

`attach(trainer, documents=True)` is what keeps documents apart; without it Hugging Face's own attention does the same
from the position ids, with a mask of S × S numbers a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from skimp.core.batch import IGNORE
from skimp.core.errors import DataError
from skimp.data.packing import PackingCounts, lay_rows


def pack(
    examples: Sequence[Mapping[str, Any]],
    seq_len: int,
    *,
    too_long: Literal["split", "truncate", "drop", "error"] = "split",
    pad_token_id: int = 0,
) -> tuple[list[dict[str, torch.Tensor]], PackingCounts]:
    """Lay tokenised examples into rows of exactly `seq_len` tokens.

    Args:
        examples: each with `input_ids` and, if not all of it is to be trained, `labels` of the same length.
        too_long: what to do with an example longer than a row: cut it wherever a row is full (texts), keep its
            beginning, drop it, or stop. All but "split" never cut an example to fill a row, and pad (chats).

    Returns:
        Rows with `input_ids`, `labels` (unshifted, as Hugging Face has them; the first token of each document is never
        a label, because nothing before it may predict it) and `position_ids`, int64 (seq_len,); and the counts.

    Raises:
        DataError: an example without tokens, or with labels of another length; or no row is left.
    """
    documents = [np.asarray(e["input_ids"], np.int64) for e in examples]
    targets = [np.asarray(e.get("labels", e["input_ids"]), np.int64) for e in examples]
    for index, (ids, labels) in enumerate(zip(documents, targets, strict=True)):
        if not len(ids) or len(labels) != len(ids):
            raise DataError(
                f"example {index} with as many labels as tokens", f"{len(ids)} tokens, {len(labels)} labels"
            )
    if not documents:
        raise DataError("examples to pack", "none")
    store, wanted = np.concatenate(documents), np.concatenate(targets)
    lengths = np.array([len(ids) for ids in documents], np.int64)
    table, counts = lay_rows(np.cumsum(lengths) - lengths, lengths, seq_len, too_long=too_long)
    rows = []
    for row in range(table.rows):
        ids = np.full(seq_len, pad_token_id, np.int64)
        labels, positions = np.full(seq_len, IGNORE, np.int64), np.zeros(seq_len, np.int64)
        at = 0
        for piece in range(table.first[row], table.first[row + 1]):
            start, n = int(table.starts[piece]), int(table.lengths[piece])
            ids[at : at + n], labels[at : at + n] = store[start : start + n], wanted[start : start + n]
            labels[at], positions[at : at + n] = IGNORE, np.arange(n)
            at += n
        positions[at:] = np.arange(seq_len - at)
        rows.append(
            {
                "input_ids": torch.from_numpy(ids),
                "labels": torch.from_numpy(labels),
                "position_ids": torch.from_numpy(positions),
            }
        )
    return rows, counts
