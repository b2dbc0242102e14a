"""The kinds of row, and a row as the text that is tokenised: which of its characters are trained.

    text        one field of plain text; every token is trained
    prompt      a prompt and its completion; the completion's tokens and the end token are trained
    messages    a conversation, rendered by a chat template; the assistant's turns are trained
    preference  a prompt with a chosen and a rejected answer: read and checked, not trained on yet

What is trained is told by place in the rendered text, never by the value of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from skimp.core.errors import DataError
from skimp.data.chat import Chat
from skimp.data.messages import RowError, conversation, tools_of
from skimp.data.readers import PLAIN, Record, Text
from skimp.data.sources import SourceFile

Format = Literal["auto", "text", "prompt", "messages", "preference"]
TrainOn = Literal["answers", "last", "all"]


@dataclass(frozen=True)
class Fields:
    """What each part of a row is called in the file; the recipe's `data.field` and `data.fields`."""

    text: str = "text"
    prompt: str = "prompt"
    completion: str = "completion"
    messages: str = "messages"
    tools: str = "tools"
    chosen: str = "chosen"
    rejected: str = "rejected"

    def of(self, kind: str) -> list[str]:
        """The fields a row of that kind must have."""
        return {
            "text": [self.text],
            "prompt": [self.prompt, self.completion],
            "messages": [self.messages],
            "preference": [self.chosen, self.rejected],
        }[kind]


@dataclass(frozen=True)
class Rules:
    """How rows are read: the part of a job that decides which tokens come out.

    Attributes:
        format: of rows; auto tells it by the fields of each source's first row.
        fields: their names.
        train_on: `answers` (every assistant turn, every completion), `last` (the last of them), or `all` (the
            prompt too).
        template: a chat template to use instead of the tokenizer's own: its text, or None.
        bad_rows: `error` stops at a row that is not as its kind must be, `drop` leaves it out and counts it.
    """

    format: Format = "auto"
    fields: Fields = field(default_factory=Fields)
    train_on: TrainOn = "answers"
    template: str | None = None
    bad_rows: Literal["error", "drop"] = "error"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Rules:
        return cls(**{**record, "fields": Fields(**record.get("fields", {}))})


def detect(names: Sequence[str], fields: Fields) -> str | None:
    """The kind of a row with these fields, or None. A text field the user named goes first, then what says more."""
    if fields.text != "text" and fields.text in names:
        return "text"
    order = ("messages", "preference", "prompt", "text")
    return next((kind for kind in order if all(n in names for n in fields.of(kind))), None)


def kind_of(asked: str, names: Sequence[str], fields: Fields, where: str) -> str:
    """The kind of a source by its first row, or the complaint that no kind has these fields.

    Raises:
        DataError: names what is there and which keys say what it means.
    """
    found = detect(names, fields) if asked == "auto" else asked
    missing = [] if found is None else [n for n in fields.of(found) if n not in names]
    if found is not None and not missing:
        return found
    there = f"fields there: {', '.join(map(str, names[:20])) or 'none'}"
    if asked == "text":
        raise no_field(where, fields.text, names)
    if asked != "auto":
        parts = {v: k for k, v in asdict(fields).items()}
        raise DataError(
            f"{where}: a row of data.format={asked}, with the field{'s' * (len(missing) > 1)} {', '.join(missing)}",
            there,
            instead=[f"data.fields.{parts[n]}=NAME of the field that holds it" for n in missing],
        )
    raise DataError(
        f"{where}: the field '{fields.text}'; or {fields.prompt} and {fields.completion}; or {fields.messages}; "
        f"or {fields.chosen} and {fields.rejected}",
        there,
        instead=[
            *(f"data.field={k}" for k in names[:3]),
            "data.fields.prompt=… data.fields.completion=…, or data.fields.messages=…, say what the fields mean",
        ],
    )


def no_field(where: str, name: str, there: Sequence[str], key: str = "data.field") -> RowError:
    return RowError(
        "field missing",
        f"{where}: the field '{name}'",
        f"fields there: {', '.join(map(str, there[:20])) or 'none'}",
        instead=[f"{key}={k}" for k in there[:3]] or "another file",
    )


class RowReader:
    """Rows of one source as texts.

    Args:
        kind: text, prompt, messages or preference.
        rules: how they are read.
        chat: renders conversations; asked for only when there is one.
    """

    def __init__(self, kind: str, rules: Rules, chat: Chat) -> None:
        self.kind, self.rules, self.chat = kind, rules, chat

    def columns(self, names: list[str]) -> list[str]:
        """The fields that are read, of those there."""
        optional = [self.rules.fields.tools] if self.kind in ("messages", "prompt") else []
        return [n for n in names if n in (*self.rules.fields.of(self.kind), *optional)]

    def text_of(self, record: Record, file: SourceFile) -> Text:
        """A row as text; with `dropped` set when it holds nothing to train on.

        Raises:
            RowError: the row is not as its kind must be.
        """
        where = f"{file.path}, row {record.row}"
        for name in self.rules.fields.of(self.kind):
            if name not in record.fields:
                parts = {v: f"data.fields.{k}" for k, v in asdict(self.rules.fields).items()}
                key = "data.field" if self.kind == "text" else parts[name]
                raise no_field(where, name, list(record.fields), key)
        if self.kind == "text":
            return Text(record.row, record.offset, self._words(record, self.rules.fields.text, where))
        if self.kind == "messages":
            return self._conversation(record, conversation(record.fields[self.rules.fields.messages], where), where)
        return self._completed(record, where)

    def _completed(self, record: Record, where: str) -> Text:
        names = self.rules.fields
        prompt = record.fields[names.prompt]
        if isinstance(prompt, list):  # a conversation cut in two: the answer is what is trained
            before = conversation(prompt, where, complete=False)
            after = conversation(record.fields[names.completion], where, answer=True)
            return self._conversation(record, [*before, *after], where, first=len(before))
        prompt, answer = (self._words(record, n, where) for n in (names.prompt, names.completion))
        if not answer.strip():
            return Text(record.row, record.offset, "", dropped="completion empty")
        at = len(prompt)
        trained = None if self.rules.train_on == "all" else ((at, at + len(answer)),)
        return Text(record.row, record.offset, prompt + answer, trained=trained, cuts=(at,) if at else ())

    def _conversation(self, record: Record, turns: list[dict[str, Any]], where: str, first: int = 0) -> Text:
        tools = tools_of(record.fields.get(self.rules.fields.tools), where)
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and i >= first]
        if self.rules.train_on != "all":
            answers = [i for i in answers if turns[i].pop("weight", 1)]
        if not answers:
            return Text(record.row, record.offset, "", dropped="no assistant turn to train on")
        text, spans = self.chat.render(turns, answers[-1:] if self.rules.train_on == "last" else answers, tools, where)
        trained = None if self.rules.train_on == "all" else tuple(spans)
        cuts = tuple(dict.fromkeys(at for span in spans for at in span if 0 < at < len(text)))
        return Text(record.row, record.offset, text, trained=trained, cuts=cuts, complete=True)

    def _words(self, record: Record, name: str, where: str) -> str:
        value = record.fields[name]
        if isinstance(value, str):
            return value
        strings = [k for k, v in record.fields.items() if isinstance(v, str)]
        raise RowError(
            "not text",
            f"{where}: text in the field '{name}'",
            "null" if value is None else f"a value of type {type(value).__name__}: {repr(value)[:60]}",
            instead=([f"data.field={k}" for k in strings[:3]] if self.kind == "text" else [])
            or "leave such rows out of the file (data.bad_rows=drop does), or make them text",
        )


def is_plain(file: SourceFile) -> bool:
    """Whether a file is text without fields."""
    return file.kind in PLAIN
