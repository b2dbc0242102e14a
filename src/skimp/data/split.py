"""Which documents are held out for validation: by a hash of (seed, document), so that the choice depends on
nothing
else: not on the order of the hash table, the number of processes or the version of a random generator."""

from __future__ import annotations

import numpy as np

from skimp.core.errors import DataError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash_documents(number: int, seed: int) -> np.ndarray:
    """(number,) uint64: SplitMix64 of each document's place, started from the mixed seed."""
    start = _mix(np.array([seed % 2**64], np.uint64) + _GOLDEN)
    return _mix(start + np.arange(1, number + 1, dtype=np.uint64) * _GOLDEN)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return np.asarray(x ^ (x >> np.uint64(31)))


def hold_out(
    lengths: np.ndarray, seed: int, fraction: float | None = None, tokens: int | None = None
) -> np.ndarray:
    """(documents,) bool, True where a document is for validation.

    Args:
        lengths: (documents,) tokens of each.
        fraction: of the documents, rounded, at least one.
        tokens: take documents in hashed order until they have at least this many.

    Raises:
        DataError: nothing would be left on one of the two sides.
    """
    order = np.argsort(hash_documents(len(lengths), seed), kind="stable")
    if fraction is not None:
        number, asked = max(1, round(fraction * len(lengths))), f"data.validation={fraction}"
    else:
        number = int(np.searchsorted(np.cumsum(lengths[order]), tokens or 0)) + 1
        asked = f"data.validation_tokens={tokens}"
    if number >= len(lengths):
        raise DataError(
            f"{asked}: validation documents held out of the training text",
            f"{len(lengths)} documents with {int(lengths.sum())} tokens in all",
            "nothing would be left to train on",
            ["hold out less", "name a validation source of its own", "cut the text into more documents"],
        )
    mask = np.zeros(len(lengths), bool)
    mask[order[:number]] = True
    return mask
