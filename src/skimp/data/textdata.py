"""What the user says about the text of a run: sources, row length, packing, long documents."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from skimp.core.errors import RecipeError, did_you_mean

TooLong = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True)
class TextData:
    """Plain text to train on. Every key is checked here, before anything is read.

    Attributes:
        train: a file (`.jsonl`, `.parquet`, `.txt`; `.gz` and `.zst` of the first and last), a folder or a
            glob of these, a Hub dataset `owner/name[:config][@revision][#split]` (or `hub:name`), `pydoc`
            (the Python language reference that ships with Python), or a list of these. Its place in the list
            is the source id.
        seq_len: tokens in a row, at least 2.
        validation: a source like `train`; or a fraction between 0 and 1 of the training documents, chosen by
            a hash of (seed, document); or None.
        validation_tokens: at most so many validation tokens (but one document at least), taken in the same
            hashed order: of the fraction, of the validation source, or, alone, of the training documents.
        packing: rows filled with several documents (True) or one document, or piece of one, per row (False).
        too_long: what happens to a document longer than a row. `split` (raw text): documents are laid end to
            end and cut where a row is full, nothing is lost. `truncate`: only its first `seq_len` tokens are
            kept; `drop`: it is left out; `error`: the run stops and names it. In the last three no document
            is ever cut by packing.
        field: the key (jsonl) or column (parquet, Hub) with the text.
        encoding: how files are encoded.
        seed: of the split and of the shuffling.
        streaming: tokenise while training instead of before; rows are then shuffled within windows.
        window_rows: rows in a shuffling window when streaming.
    """

    train: str | Sequence[str]
    seq_len: int
    validation: str | Sequence[str] | float | None = None
    validation_tokens: int | None = None
    packing: bool = True
    too_long: TooLong = "split"
    field: str = "text"
    encoding: str = "utf-8"
    seed: int = 0
    streaming: bool = False
    window_rows: int = 256

    def __post_init__(self) -> None:
        _names("data.train", self.train)
        _whole("data.seq_len", self.seq_len, 2, "a row of one token has nothing to predict")
        _whole("data.seed", self.seed, 0)
        _whole("data.window_rows", self.window_rows, 1)
        if self.too_long not in get_args(TooLong):
            near = did_you_mean(str(self.too_long), get_args(TooLong))
            raise RecipeError("data.too_long: a rule for long documents", repr(self.too_long), instead=near)
        if not isinstance(self.field, str) or not self.field:
            raise RecipeError("data.field: the name of the key or column with the text", repr(self.field))
        try:
            codecs.lookup(self.encoding)
        except (LookupError, TypeError):
            raise RecipeError(
                "data.encoding: a text encoding Python knows",
                repr(self.encoding),
                instead="utf-8, latin-1, cp1252, cp949, gb18030, shift_jis …",
            ) from None
        self._check_validation()

    def _check_validation(self) -> None:
        if isinstance(self.validation, (bool, int, float)):
            if isinstance(self.validation, bool) or not 0 < self.validation < 1:
                raise RecipeError(
                    "data.validation: a source, or a fraction between 0 and 1",
                    repr(self.validation),
                    instead=f"data.validation_tokens={self.validation} holds out that many tokens"
                    if type(self.validation) is int and self.validation > 1
                    else "data.validation=0.05",
                )
        elif self.validation is not None:
            _names("data.validation", self.validation)
        if self.streaming and self.held_out:
            raise RecipeError(
                "data.streaming: true with validation documents held out of the training text",
                "no end of the stream is known before it has been read",
                "which documents a fraction or a count takes is settled over all of them",
                ["data.validation=FILE, a source of its own, or null for none", "data.streaming=false"],
            )
        if self.validation_tokens is not None:
            _whole("data.validation_tokens", self.validation_tokens, 1)

    @property
    def held_out(self) -> bool:
        """Whether validation documents are taken out of the training sources."""
        if self.validation is None:
            return self.validation_tokens is not None
        return isinstance(self.validation, float)

    def sources(self, which: Literal["train", "validation"]) -> list[str]:
        """The source names of one set; empty when it has none of its own."""
        value = self.train if which == "train" else self.validation
        if value is None or isinstance(value, float):
            return []
        return [value] if isinstance(value, str) else list(value)


def _names(key: str, value: Any) -> None:
    if isinstance(value, str) and value:
        return
    if isinstance(value, Sequence) and value and all(isinstance(v, str) and v for v in value):
        return
    raise RecipeError(f"{key}: a file, folder, glob, Hub dataset or 'pydoc', or a list of these", repr(value))


def _whole(key: str, value: Any, least: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecipeError(f"{key}: a whole number, at least {least}", repr(value), why)
