"""`data:` — what is read, how it is split, cut and packed into rows of seq_len tokens."""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from skimp.recipe.fields import Flag, Number, Section, Whole, Words, number, refuse

Format = Literal["auto", "text", "prompt", "messages", "preference"]


def _sources(value: Any) -> Any:
    """One source or a list of them, as a tuple; 'pydoc' and ['pydoc'] are the same recipe."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(s, str) and s for s in listed):
        raise refuse("a file, folder, glob, Hub data set or 'pydoc', or a list of these", "write train: my.jsonl")
    return tuple(listed)


def _entries(value: Any) -> Any:
    """Sources, each a name or a mapping that says more of it."""
    listed = [value] if isinstance(value, (str, dict, TrainSource)) else value
    good = isinstance(listed, (list, tuple)) and listed
    if not good or not all((isinstance(s, str) and s) or isinstance(s, (dict, TrainSource)) for s in listed):
        raise refuse(
            "a file, folder, glob, Hub data set or 'pydoc', or a list of these, or of {source, weight}",
            "write train: my.jsonl",
        )
    return tuple(listed)


def _validation(value: Any) -> Any:
    """A fraction in (0, 1), a source, sources by name, or None."""
    if value is None:
        return None
    if isinstance(value, dict):
        if not value or not all(isinstance(name, str) and name and name != "train" for name in value):
            raise refuse(
                "names of sets (other than train), each with its source", "write validation: {code: code.jsonl}"
            )
        return {name: _sources(source) for name, source in value.items()}
    try:
        fraction = number(value)
    except PydanticCustomError:
        if isinstance(value, str) and value:
            return value
        raise refuse(
            "a fraction between 0 and 1, a source, sources by name, or null", "write validation: 0.05"
        ) from None
    if not 0 < fraction < 1:
        raise refuse(
            "a fraction between 0 and 1, a source, or null",
            "write validation: 0.05 and cap it with data.validation_tokens, or validation: null for none",
        )
    return fraction


_STRINGS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Sources = Annotated[tuple[str, ...], BeforeValidator(_sources), WithJsonSchema(_STRINGS)]


class TrainSource(Section):
    """One training source, with what is said of it alone."""

    source: Sources = Field(description="A file, folder, glob, Hub data set or pydoc, or a list of these.")
    weight: Number | None = Field(
        default=None, gt=0, description="Its share of the rows beside the other weights; null: read once an epoch."
    )
    format: Format | None = Field(default=None, description="Of its rows; null: data.format.")
    name: Words | None = Field(default=None, min_length=1, description="What counts call it; null: the source.")


def _entry_tag(value: Any) -> str:
    return "name" if isinstance(value, str) else TrainSource.__name__


#: A source by its name alone, or with what is said of it. Told apart beforehand, so that a slip is reported once.
Entry = Annotated[
    Annotated[str, Tag("name")] | Annotated[TrainSource, Tag(TrainSource.__name__)], Discriminator(_entry_tag)
]


class Fields(Section):
    """The names of a row's fields."""

    prompt: Words = Field(default="prompt", min_length=1, description="What comes before the answer.")
    completion: Words = Field(default="completion", min_length=1, description="The answer that is trained.")
    messages: Words = Field(default="messages", min_length=1, description="A list of turns, {role, content} each.")
    tools: Words = Field(default="tools", min_length=1, description="Tools the template may print, with messages.")
    chosen: Words = Field(default="chosen", min_length=1, description="The better answer of a pair.")
    rejected: Words = Field(default="rejected", min_length=1, description="The worse answer of a pair.")


class Data(Section):
    """The text of the run, from files to packed rows."""

    train: Annotated[tuple[Entry, ...], BeforeValidator(_entries)] = Field(
        description="Training text: .jsonl, .json, .parquet, .csv, .tsv or .txt files (each also .gz or .zst), "
        "folders, globs, a Hub data set, or pydoc (the Python language reference). One source or a list; an "
        "entry may be {source, weight, format, name}, and with weights the sources are mixed in these shares."
    )
    when_out: Literal["repeat", "stop"] = Field(
        default="repeat",
        description="A source of a mixture that has given all its rows begins anew, or ends the run.",
    )
    validation: Annotated[
        float | str | dict[str, tuple[str, ...]] | None,
        BeforeValidator(_validation),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "number"},
                    {"type": "string"},
                    {"type": "object", "additionalProperties": _STRINGS, "minProperties": 1},
                    {"type": "null"},
                ]
            }
        ),
    ] = Field(
        default=0.05,
        description="Held-out text: a fraction of the training documents, a source of its own, several by name "
        "({code: code.jsonl, chat: chat.jsonl}), or null for none.",
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
    format: Format = Field(
        default="auto",
        description="What a row is: text; a prompt and its completion; messages, rendered by the chat template; "
        "preference pairs, which are checked and not trained on yet. auto tells by the fields of a source's first row.",
    )
    field: Words = Field(default="text", min_length=1, description="The field of a row that holds the text.")
    fields: Fields = Field(
        default_factory=Fields, description="The other fields, where a file does not call them by these names."
    )
    train_on: Literal["answers", "last", "all"] = Field(
        default="answers",
        description="answers trains completions and every assistant turn; last only the last of them in a row; "
        "all the prompt too.",
    )
    template: Words | None = Field(
        default=None,
        min_length=1,
        description="A chat template instead of the tokenizer's own: a Jinja file, or chatml.",
    )
    bad_rows: Literal["error", "drop"] = Field(
        default="error",
        description="A row that is not as its format must be (roles out of order, a field missing) stops the run and "
        "is named, or is left out and counted.",
    )
    too_long: Literal["auto", "split", "truncate", "drop", "error"] = Field(
        default="auto",
        description="What happens to a document longer than seq_len. auto: split for text, truncate for answers and "
        "conversations.",
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
