"""Document boundaries declared by a collator: what packed and padded batches say of themselves, on the host.

Hugging Face finds packed documents by looking at position ids inside the model and then builds an S × S mask for
every row. Here the collator, which has the numbers on the host anyway, says where documents begin, and attention
splits there (`skimp.core.attention`): no mask exists.

Padding on the right becomes a last document of its own: under a causal mask no token before it can see it, and its
labels are ignored, so the loss is that of the masked batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from skimp.core.errors import DataError
from skimp.hf.forward import DOCUMENTS

#: What collators add for flash kernels; the declared boundaries say the same.
FOR_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class Declared:
    """A collator that adds `documents`: for each row its offsets and end, as `Batch.documents`.

    Args:
        collator: gives `input_ids` (rows, seq) and, where rows are packed, `position_ids` that restart at each
            document (`DataCollatorWithFlattening`, TRL's padding-free collator, rows of `skimp.hf.pack`); or an
            `attention_mask` that pads on the right.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, features: Any) -> dict[str, Any]:
        """The inner collator's batch with `documents`. Its mask stays for who counts by it; the model never sees it.

        Raises:
            DataError: padding on the left or in the middle, or positions that restart elsewhere than at 0.
        """
        batch = dict(self.collator(features))
        rows, seq = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        for key in FOR_FLASH:
            batch.pop(key, None)
        ends = _lengths(mask) if mask is not None else [seq] * rows
        positions = batch.get("position_ids")
        starts = _starts(positions) if positions is not None else [(0,)] * rows
        batch[DOCUMENTS] = tuple(_offsets(begin, end, seq) for begin, end in zip(starts, ends, strict=True))
        return batch


def _lengths(mask: Any) -> list[int]:
    """Tokens before the padding of each row."""
    ones = np.asarray(mask) != 0
    lengths = ones.sum(1)
    if (ones != (np.arange(ones.shape[1]) < lengths[:, None])).any() or not lengths.all():
        raise DataError(
            "batches padded on the right",
            "a row whose padding is on the left or in the middle, or that is padding only",
            "causal attention without a mask lets a token see everything on its left",
            "tokenizer.padding_side = 'right'",
        )
    return [int(n) for n in lengths]


def _starts(positions: Any) -> list[tuple[int, ...]]:
    """Where each row's documents begin: wherever a position is not the one before it plus 1."""
    table = np.asarray(positions)
    begins = np.ones_like(table, dtype=bool)
    begins[:, 1:] = table[:, 1:] != table[:, :-1] + 1
    if (table[begins] != 0).any():
        raise DataError(
            "position_ids that restart at 0",
            "a row in which they jump to another number",
            "a document begins at position 0; a jump inside one has no meaning for attention",
            "let the collator number each document from 0",
        )
    return [tuple(int(i) for i in np.flatnonzero(row)) for row in begins]


def _offsets(begins: tuple[int, ...], end: int, seq: int) -> tuple[int, ...]:
    """Offsets of documents before `end`, then the padding as one more, then the row's end."""
    inside = tuple(b for b in begins if b < end)
    return (*inside, seq) if end == seq else (*inside, end, seq)
