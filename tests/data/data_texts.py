"""Texts for the tests of the data room."""

from __future__ import annotations

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far", "from", "here"]


def document(index: int, words: int) -> str:
    """A text that starts with its own number, so that it can be told from all others."""
    return f"{index} " + " ".join(WORDS[(index + i * i) % len(WORDS)] for i in range(words))
