"""Rows to token ids, and which of them are trained; in the child process, a bounded amount at a time."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skimp.core.errors import DataError
from skimp.data.chat import Chat
from skimp.data.kinds import RowReader, Rules, is_plain
from skimp.data.look import Look
from skimp.data.messages import RowError
from skimp.data.readers import BLOCK, Entry, Text, cut, read_plain, read_records
from skimp.data.sources import SourceFile
from skimp.data.split import is_held
from skimp.data.tokenizer import LoadedTokenizer, with_exact_places

TEXTS_AT_ONCE = 256
HELD = "held out for validation"


@dataclass
class Counts:
    """What was read; everything left out is in `dropped`, by reason."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    unknown_tokens: int = 0
    documents_in_blocks: int = 0
    highest_token: int = -1
    dropped: dict[str, int] = field(default_factory=lambda: {"empty": 0})

    def drop(self, why: str) -> None:
        self.dropped[why] = self.dropped.get(why, 0) + 1

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            if name == "dropped":
                self.dropped |= {why: self.dropped.get(why, 0) + n for why, n in value.items()}
            elif name == "highest_token":
                self.highest_token = max(self.highest_token, value)
            else:
                setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Encoded:
    """Tokens of a document or of a block of one, uint32; `first` and `last` bound the document. `digest` is
    the 64-bit hash of its whole text, known at its last block. `trained` (bool a token) is None when all are;
    `dropped` says why a row is left out: it has no tokens."""

    file: int
    row: int
    offset: int
    tokens: np.ndarray
    first: bool
    last: bool
    digest: int
    trained: np.ndarray | None = None
    dropped: str = ""


class Encoder:
    """Tokenises documents of many files in order. A text gets the end token after it and one begin token where
    the tokenizer wants it, but no second one; a rendered conversation gets neither: its template says all.

    Args:
        tokenizer: loaded.
        rules: how rows are read.
        encoding: of the files.
        source_of, asked: see `Look`.
        hold: seed and fraction of the documents held out of a stream for validation, or None.
        held: give those and no others, instead of leaving them out.
    """

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        rules: Rules,
        encoding: str,
        source_of: Sequence[int] | None = None,
        asked: Sequence[str] | None = None,
        hold: dict[str, Any] | None = None,
        held: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self.encoding = encoding
        self.look = Look(rules, encoding, source_of, asked)
        self.hold = hold
        self.held = held
        self.by_source: dict[int, Counts] = {}
        self._chat = Chat(rules.template or tokenizer.template, tokenizer.special, tokenizer.markers, tokenizer.path)
        self._places: Any = None
        self._open: tuple[int, int] | None = None  # (file, row) of the document whose blocks are coming
        self._hash: Any = None

    @property
    def counts(self) -> Counts:
        """Of all sources together."""
        total = Counts()
        for counts in self.by_source.values():
            total.add(counts)
        return total

    def documents(self, files: Sequence[SourceFile], start: int = 0, entry: Entry | None = None) -> Iterator[Encoded]:
        """All documents of `files[start:]`, the first of them from `entry` on."""
        waiting: list[tuple[int, Text]] = []
        size = 0
        for index in range(start, len(files)):
            at = entry if entry is not None and index == start else Entry()
            for text in self._texts(index, files[index], at):
                waiting.append((index, text))
                size += len(text.text)
                if size >= BLOCK or len(waiting) >= TEXTS_AT_ONCE:
                    yield from self._encode(waiting, files)
                    waiting, size = [], 0
        yield from self._encode(waiting, files)

    def _texts(self, index: int, file: SourceFile, entry: Entry) -> Iterator[Text]:
        kind = self.look.kind(index, file)
        if kind is None:
            return
        if is_plain(file):
            for text in read_plain(file, self.encoding, entry):
                if self._is_held(index, text.row) == self.held:
                    yield text
                elif not self.held and text.last:
                    yield Text(text.row, text.offset, "", dropped=HELD)
            return
        rows = RowReader(kind, self.rules, self._chat)
        for record in read_records(file, self.encoding, entry, rows.columns):
            if self._is_held(index, record.row) != self.held:
                if not self.held:
                    yield Text(record.row, record.offset, "", dropped=HELD)
                continue
            try:
                text = rows.text_of(record, file)
            except RowError as error:
                if self.rules.bad_rows == "error":
                    raise
                text = Text(record.row, record.offset, "", dropped=error.reason)
            yield from _blocks(text)

    def _is_held(self, index: int, row: int) -> bool:
        return self.hold is not None and is_held(self.hold["seed"], index, row, self.hold["fraction"])

    def _encode(self, texts: list[tuple[int, Text]], files: Sequence[SourceFile]) -> Iterator[Encoded]:
        hashes = [self._digest(index, text, files) for index, text in texts]
        plain = [t.text for _, t in texts if t.trained is None and not t.cuts]
        encoded = iter(self.tokenizer.encode.encode_batch_fast(plain, add_special_tokens=False))
        parted = iter(self._parted([t for _, t in texts if t.trained is not None or t.cuts]))
        for (index, text), digest in zip(texts, hashes, strict=True):
            if text.trained is None and not text.cuts:
                ids, trained = next(encoded).ids, None
            else:
                ids, trained = next(parted)
            first = self._open != (index, text.row)
            self._open = None if text.last else (index, text.row)
            counts = self.by_source.setdefault(self.look.source(index), Counts())
            counts.rows += first
            counts.documents_in_blocks += first and not text.last
            dropped = text.dropped
            if first and text.last and not dropped and (not ids or not text.text.strip()):
                dropped = "empty"
            if not dropped and trained is not None and not trained[1:].any() and not self._ends(text, ids):
                dropped = "no trained token"
            if dropped:
                counts.drop(dropped)
                none = np.zeros(0, np.uint32)
                yield Encoded(index, text.row, text.offset, none, first, text.last, digest, dropped=dropped)
                continue
            tokens, trained = self._finish(ids, trained, first, text)
            counts.documents += first
            counts.tokens += len(tokens)
            counts.trained_tokens += len(tokens) if trained is None else int(np.count_nonzero(trained))
            if len(tokens):
                counts.highest_token = max(counts.highest_token, int(tokens.max()))
            if self.tokenizer.unknown is not None:
                counts.unknown_tokens += int(np.count_nonzero(tokens == self.tokenizer.unknown))
            yield Encoded(index, text.row, text.offset, tokens, first, text.last, digest, trained)

    def _parted(self, texts: list[Text]) -> Iterator[tuple[list[int], np.ndarray | None]]:
        """Ids of texts with places, and which of them are trained: those whose characters lie in a trained span.

        Where it can be, tokenising begins anew where an answer begins, as it does at inference after the prompt, and
        where it ends, as the model must end it: no token then holds characters of both sides. Where it cannot (see
        `LoadedTokenizer.joins`), such a token is not trained, unless all it has of the prompt is a blank before it.
        """
        if not texts:
            return
        if self._places is None:
            self._places = with_exact_places(self.tokenizer.path)
        parts, begins = [], []
        for text in texts:
            cuts = [0, *(text.cuts if self.tokenizer.joins else ()), len(text.text)]
            begins.append(cuts[:-1])
            parts += [text.text[a:b] for a, b in itertools.pairwise(cuts)]
        encoded = iter(self._places.encode_batch(parts, add_special_tokens=False))
        for text, starts in zip(texts, begins, strict=True):
            ids: list[int] = []
            places: list[tuple[int, int]] = []
            for start in starts:
                part = next(encoded)
                ids += part.ids
                places += [(a + start, b + start) for a, b in part.offsets]
            if not self.tokenizer.joins:
                places = [_without_blank(text.text, *place) for place in places]
            yield ids, None if text.trained is None else _within(places, text.trained)

    def _ends(self, text: Text, ids: list[int]) -> bool:
        """Whether an end token comes after the text, to be trained."""
        return not text.complete and ids[-1:] != [self.tokenizer.end]

    def _finish(
        self, ids: list[int], trained: np.ndarray | None, first: bool, text: Text
    ) -> tuple[np.ndarray, np.ndarray | None]:
        begin = self.tokenizer.begin
        if text.complete:
            return np.asarray(ids, dtype=np.uint32), trained
        head = [begin] if first and begin is not None and ids[:1] != [begin] else []
        tail = [self.tokenizer.end] if text.last and ids[-1:] != [self.tokenizer.end] else []
        if trained is not None and (head or tail):
            trained = np.concatenate([np.zeros(len(head), bool), trained, np.ones(len(tail), bool)])
        return np.asarray(head + ids + tail if head or tail else ids, dtype=np.uint32), trained

    def _digest(self, index: int, text: Text, files: Sequence[SourceFile]) -> int:
        try:
            data = text.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{files[index].path}, row {text.row}: text",
                f"half of a surrogate pair, {text.text[error.start]!r}, at character {error.start}",
                "it stands for no character and no tokenizer can read it",
                "write the character whole, or leave it out",
            ) from None
        if self._hash is None:
            self._hash = hashlib.blake2b(digest_size=8)
        self._hash.update(data)
        digest = int.from_bytes(self._hash.digest(), "little")
        if text.last:
            self._hash = None
        return digest


def _blocks(text: Text) -> Iterator[Text]:
    """A row's plain text in blocks, as that of a file; one with places stays whole."""
    if text.trained is not None or text.cuts or text.complete or len(text.text) <= BLOCK:
        yield text
        return
    yield from cut(text.row, text.offset, [text.text])


def _without_blank(text: str, start: int, end: int) -> tuple[int, int]:
    """A token's place without the blank it begins with; a token of blanks alone keeps its place."""
    word = text[start:end].lstrip()
    return (end - len(word), end) if word else (start, end)


def _within(places: list[tuple[int, int]], spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """(tokens,) bool: its characters [a, b) lie in one of the spans, which are in order and apart."""
    begins, ends = (np.array(side, np.int64) for side in zip(*spans, strict=True))
    at = np.array(places, np.int64).reshape(-1, 2)
    # An empty place (no characters of its own) goes with what begins there, so a span's own end is outside it.
    span = np.searchsorted(begins, at[:, 0], side="right") - 1
    inside = (span >= 0) & (at[:, 1] <= ends[span]) & (at[:, 0] < ends[span])
    return np.asarray(inside)
