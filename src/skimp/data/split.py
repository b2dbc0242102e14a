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


def is_held(seed: int, file: int, row: int, fraction: float) -> bool:
    """Whether a document of a stream is held out: by SplitMix64 of its own place, whatever else there is."""
    place = np.array([file << 40 | row], np.uint64)
    start = _mix(np.array([seed % 2**64], np.uint64) + _GOLDEN)
    return bool(_mix(start + place * _GOLDEN)[0] < np.uint64(fraction * 2**64))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return np.asarray(x ^ (x >> np.uint64(31)))


def first_by_hash(lengths: np.ndarray, seed: int, fraction: float | None, tokens: int | None) -> np.ndarray:
    """(chosen,) int64, documents in hashed order: `fraction` of them (None: all), rounded, but no more than
    hold `tokens` tokens (None: any number); one at least."""
    order = np.argsort(hash_documents(len(lengths), seed), kind="stable")
    number = len(lengths) if fraction is None else round(fraction * len(lengths))
    if tokens is not None:
        number = min(number, int(np.searchsorted(np.cumsum(lengths[order]), tokens, side="right")))
    return order[: max(1, number)]


def hold_out(lengths: np.ndarray, seed: int, fraction: float | None, tokens: int | None) -> np.ndarray:
    """(documents,) bool, True where a document is for validation and not for training.

    Args:
        lengths: (documents,) tokens of each.
        seed: of the hash.
        fraction: of the documents, or None.
        tokens: hold out no more than this, or None.

    Raises:
        DataError: nothing would be left to train on.
    """
    chosen = first_by_hash(lengths, seed, fraction, tokens)
    if len(chosen) >= len(lengths):
        asked = [f"data.validation={fraction}"] if fraction is not None else []
        asked += [f"data.validation_tokens={tokens}"] if tokens is not None else []
        raise DataError(
            f"{', '.join(asked)}: validation documents held out of the training text",
            f"{len(lengths)} documents with {int(lengths.sum())} tokens in all",
            "nothing would be left to train on",
            ["hold out less", "name a validation source of its own", "cut the text into more documents"],
        )
    mask = np.zeros(len(lengths), bool)
    mask[chosen] = True
    return mask
