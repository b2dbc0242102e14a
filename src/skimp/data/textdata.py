"""What the user says about the text of a run: sources, kinds of row, row length, packing, long documents."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any, Literal, get_args

from skimp.core.errors import RecipeError, did_you_mean
from skimp.data.chat import template_text
from skimp.data.kinds import Fields, Format, Rules, TrainOn

WhenOut = Literal["repeat", "stop"]
TooLong = Literal["auto", "split", "truncate", "drop", "error"]
BadRows = Literal["error", "drop"]


@dataclass(frozen=True)
class TrainSource:
    """One training source with what is said of it alone.

    Attributes:
        source: a file, folder, glob, Hub dataset or 'pydoc', or several.
        weight: its share of the rows, beside the other weights; None: it is not mixed but read once an epoch.
        format: of its rows; None: `TextData.format`.
        name: what it is called in counts; None: the source.
    """

    source: str | Sequence[str]
    weight: float | None = None
    format: Format | None = None
    name: str | None = None

    @property
    def sources(self) -> list[str]:
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def label(self) -> str:
        return self.name or ", ".join(self.sources)


@dataclass(frozen=True)
class TextData:
    """Text, answers or conversations to train on. Every key is checked here, before anything is read.

    Attributes:
        train: a file (`.jsonl`, `.json`, `.parquet`, `.csv`, `.tsv`, `.txt`; each also `.gz` or `.zst`), a folder
            or a glob of these, a Hub dataset `owner/name[:config][@revision][#split]` (or `hub:name`), `pydoc`
            (the Python language reference that ships with Python), or a list of these. Its place in the list
            is the source id. An entry may be a `TrainSource`; with weights, the sources are mixed row by row in
            these shares instead of each row coming once an epoch.
        seq_len: tokens in a row, at least 2.
        when_out: of a mixture, when one source has given all its rows: `repeat` begins it anew in another order,
            `stop` ends the text.
        validation: a source like `train`; or several sets, name -> source; or a fraction between 0 and 1 of the
            training documents, chosen by a hash of (seed, document); or None.
        validation_tokens: at most so many validation tokens (but one document at least), taken in the same
            hashed order: of the fraction, of each validation set, or, alone, of the training documents.
        packing: rows filled with several documents (True) or one document, or piece of one, per row (False).
        too_long: what happens to a document longer than a row. `auto` is `split` for text and `truncate` for
            answers and conversations, which must keep their beginning. `split`: documents are laid end to
            end and cut where a row is full, nothing is lost. `truncate`: only its first `seq_len` tokens are
            kept; `drop`: it is left out; `error`: the run stops and names it. In the last three no document
            is ever cut by packing.
        field: the key (jsonl, json) or column (csv, parquet, Hub) with the text.
        format: of the rows: `text`, `prompt` (and completion), `messages` (a conversation), `preference` (pairs:
            checked, not trained on yet), or `auto`: told by the fields of a source's first row.
        fields: names of the other fields, where they are not called as they are called here.
        train_on: `answers`: completions, and every assistant turn; `last`: the last of them in each row; `all`:
            the prompt too. It says nothing about `text`, which is trained whole.
        template: a chat template to use instead of the tokenizer's own: a Jinja file, or `chatml`.
        bad_rows: what a row that is not as its format must be does: `error` stops and names it, `drop` leaves it
            out and counts it.
        encoding: how files are encoded.
        seed: of the split and of the shuffling.
        streaming: tokenise while training instead of before; rows are then shuffled within windows.
        window_rows: rows in a shuffling window when streaming.
    """

    train: str | Sequence[str | TrainSource]
    seq_len: int
    validation: str | Sequence[str] | Mapping[str, str | Sequence[str]] | float | None = None
    validation_tokens: int | None = None
    packing: bool = True
    too_long: TooLong = "auto"
    field: str = "text"
    format: Format = "auto"
    fields: Fields = dataclass_field(default_factory=Fields)
    train_on: TrainOn = "answers"
    template: str | None = None
    bad_rows: BadRows = "error"
    encoding: str = "utf-8"
    seed: int = 0
    streaming: bool = False
    window_rows: int = 256
    when_out: WhenOut = "repeat"

    def __post_init__(self) -> None:
        entries = [self.train] if isinstance(self.train, (str, TrainSource)) else self.train
        names = [e.source if isinstance(e, TrainSource) else e for e in entries]
        for name in names or [()]:
            _names("data.train", name)
        _check_weights([e if isinstance(e, TrainSource) else TrainSource(e) for e in entries])
        _whole("data.seq_len", self.seq_len, 2, "a row of one token has nothing to predict")
        _whole("data.seed", self.seed, 0)
        _whole("data.window_rows", self.window_rows, 1)
        for key, kinds, what in (
            ("too_long", TooLong, "a rule for long documents"),
            ("format", Format, "a kind of row"),
            ("train_on", TrainOn, "what of a row is trained"),
            ("bad_rows", BadRows, "a rule for malformed rows"),
            ("when_out", WhenOut, "a rule for a source that has given all"),
        ):
            value = getattr(self, key)
            if value not in get_args(kinds):
                near = did_you_mean(str(value), get_args(kinds))
                raise RecipeError(f"data.{key}: {what}", repr(value), instead=near)
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
        elif isinstance(self.validation, Mapping):
            for name, source in self.validation.items():
                if name == "train" or not isinstance(name, str) or not name:
                    raise RecipeError("data.validation: a name for each set, other than train", repr(name))
                _names(f"data.validation.{name}", source)
            if not self.validation:
                raise RecipeError("data.validation: sets by name", "none", instead="data.validation=null for none")
        elif self.validation is not None:
            _names("data.validation", self.validation)
        if self.streaming and self.held_out and not isinstance(self.validation, float):
            raise RecipeError(
                "data.streaming: true with a number of validation tokens held out of the training text",
                "no end of the stream is known before it has been read",
                "which documents a count takes is settled over all of them",
                ["data.validation=0.05, a fraction: then each document is told by its own hash",
                 "data.validation=FILE, a source of its own", "data.streaming=false"],
            )  # fmt: skip
        if self.validation_tokens is not None:
            _whole("data.validation_tokens", self.validation_tokens, 1)

    def rule(self, kind: str) -> TooLong:
        """What happens to a long document of this kind."""
        if self.too_long != "auto":
            return self.too_long
        return "split" if kind == "text" else "truncate"

    @property
    def rules(self) -> Rules:
        """How the child reads rows.

        Raises:
            DataError: the template cannot be read.
        """
        fields = replace(self.fields, text=self.field)
        return Rules(self.format, fields, self.train_on, template_text(self.template), self.bad_rows)

    @property
    def held_out(self) -> bool:
        """Whether validation documents are taken out of the training sources."""
        if self.validation is None:
            return self.validation_tokens is not None
        return isinstance(self.validation, float)

    @property
    def parts(self) -> list[list[TrainSource]]:
        """The training sources that are laid into rows together: all, or each of a mixture on its own."""
        listed = [self.train] if isinstance(self.train, (str, TrainSource)) else self.train
        entries = [e if isinstance(e, TrainSource) else TrainSource(e) for e in listed]
        return [[e] for e in entries] if entries[0].weight is not None else [entries]

    @property
    def weights(self) -> list[float] | None:
        """The share of each source of a mixture; they sum to 1. None without weights."""
        given = [e.weight for part in self.parts for e in part if e.weight is not None]
        return [w / sum(given) for w in given] or None

    @property
    def validation_sets(self) -> dict[str, list[str]]:
        """The sources of each validation set that has its own."""
        value = self.validation
        if value is None or isinstance(value, float):
            return {}
        sets = value if isinstance(value, Mapping) else {"validation": value}
        return {name: [s] if isinstance(s, str) else list(s) for name, s in sets.items()}


def _names(key: str, value: Any) -> None:
    if isinstance(value, str) and value:
        return
    if isinstance(value, Sequence) and value and all(isinstance(v, str) and v for v in value):
        return
    raise RecipeError(f"{key}: a file, folder, glob, Hub dataset or 'pydoc', or a list of these", repr(value))


def _whole(key: str, value: Any, least: int, why: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecipeError(f"{key}: a whole number, at least {least}", repr(value), why)


def _check_weights(entries: Sequence[TrainSource]) -> None:
    weighed = [e for e in entries if e.weight is not None]
    for entry in weighed:
        if isinstance(entry.weight, bool) or not isinstance(entry.weight, (int, float)) or not entry.weight > 0:
            raise RecipeError(f"data.train: the weight of {entry.label}, above 0", repr(entry.weight))
    if weighed and len(weighed) != len(entries):
        bare = next(e for e in entries if e.weight is None)
        raise RecipeError(
            "data.train: a weight for every source, or for none",
            f"none for {bare.label}",
            "the shares of a mixture are those of all its rows",
            "give it a weight, or take the others away: then each row comes once an epoch",
        )
    labels = [e.label for e in weighed]
    if twice := sorted({n for n in labels if labels.count(n) > 1}):
        raise RecipeError(
            "data.train: a name for each source of a mixture", f"{', '.join(twice)} twice", instead="name: …"
        )
