"""`data:` — what is read, how it is split, cut and packed into rows of seq_len tokens."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from skimp.recipe.fields import Flag, Section, Whole, Words, number, refuse


def _sources(value: Any) -> Any:
    """One source or a list of them, as a tuple; 'pydoc' and ['pydoc'] are the same recipe."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(s, str) and s for s in listed):
        raise refuse("a file, folder, glob, Hub data set or 'pydoc', or a list of these", "write train: my.jsonl")
    return tuple(listed)


def _validation(value: Any) -> Any:
    """A fraction in (0, 1), a source, or None."""
    if value is None:
        return None
    try:
        fraction = number(value)
    except PydanticCustomError:
        if isinstance(value, str) and value:
            return value
        raise refuse("a fraction between 0 and 1, a source, or null", "write validation: 0.05") from None
    if not 0 < fraction < 1:
        raise refuse(
            "a fraction between 0 and 1, a source, or null",
            "write validation: 0.05 and cap it with data.validation_tokens, or validation: null for none",
        )
    return fraction


Sources = Annotated[
    tuple[str, ...],
    BeforeValidator(_sources),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
]


class Data(Section):
    """The text of the run, from files to packed rows."""

    train: Sources = Field(
        description="Training text: .jsonl, .parquet or .txt files, folders, globs, a Hub data set, or "
        "pydoc (the Python "
        "language reference). One source or a list."
    )
    validation: Annotated[
        float | str | None,
        BeforeValidator(_validation),
        WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
    ] = Field(
        default=0.05,
        description="Held-out text: a fraction of the training documents, a source of its own, or null for none.",
    )
    validation_tokens: Whole | None = Field(
        default=None, ge=1, description="Hold out at most this many tokens; null keeps the whole split."
    )
    seq_len: Whole = Field(default=512, ge=2, description="Tokens in one row.")
    packing: Flag = Field(
        default=True,
        description="Lay documents end to end in a row, without attention across them and with positions "
        "restarting; "
        "false puts one document in a row and pads it.",
    )
    field: Words = Field(
        default="text", min_length=1, description="The field of a .jsonl or .parquet row that holds the text."
    )
    too_long: Literal["split", "truncate", "drop", "error"] = Field(
        default="split", description="What happens to a document longer than seq_len."
    )
    seed: Whole = Field(default=0, ge=0, description="Seed of the split and of the order of rows.")
    streaming: Flag = Field(
        default=False,
        description="Tokenise while training, with bounded memory, instead of into a memory-mapped file first.",
    )
    encoding: Words = Field(default="utf-8", description="Character encoding of text files.")

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            return codecs.lookup(value).name
        except LookupError:
            raise refuse("a character encoding that Python knows", "write utf-8, latin-1, cp1252 or utf-16") from None
