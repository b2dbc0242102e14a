"""Texts to token ids, in the child process, a bounded amount at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skimp.core.errors import DataError
from skimp.data.readers import BLOCK, Entry, Text, read_texts
from skimp.data.sources import SourceFile
from skimp.data.tokenizer import LoadedTokenizer

TEXTS_AT_ONCE = 256


@dataclass
class Counts:
    """What was read; everything left out is in `dropped`, by reason."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    documents_in_blocks: int = 0
    highest_token: int = -1
    dropped: dict[str, int] = field(default_factory=lambda: {"empty": 0})


@dataclass(frozen=True)
class Encoded:
    """Tokens of a document or of a block of one, uint32; `first` and `last` bound the document. `digest` is
    the 64-bit hash of its whole text, known at its last block."""

    file: int
    row: int
    offset: int
    tokens: np.ndarray
    first: bool
    last: bool
    digest: int


class Encoder:
    """Tokenises documents of many files in order, with the end token after each and one begin token where the
    tokenizer wants it. A document whose text already ends with the end token gets no second one."""

    def __init__(self, tokenizer: LoadedTokenizer, text_field: str, encoding: str) -> None:
        self.tokenizer = tokenizer
        self.text_field = text_field
        self.encoding = encoding
        self.counts = Counts()
        self._open: tuple[int, int] | None = None  # (file, row) of the document whose blocks are coming
        self._hash: Any = None

    def documents(self, files: Sequence[SourceFile], start: int = 0, entry: Entry | None = None) -> Iterator[Encoded]:
        """All documents of `files[start:]`, the first of them from `entry` on."""
        waiting: list[tuple[int, Text]] = []
        size = 0
        for index in range(start, len(files)):
            at = entry if entry is not None and index == start else Entry()
            for text in read_texts(files[index], self.text_field, self.encoding, at):
                waiting.append((index, text))
                size += len(text.text)
                if size >= BLOCK or len(waiting) >= TEXTS_AT_ONCE:
                    yield from self._encode(waiting, files)
                    waiting, size = [], 0
        yield from self._encode(waiting, files)

    def _encode(self, texts: list[tuple[int, Text]], files: Sequence[SourceFile]) -> Iterator[Encoded]:
        hashes = [self._digest(index, text, files) for index, text in texts]
        encoded = self.tokenizer.encode.encode_batch_fast([t.text for _, t in texts], add_special_tokens=False)
        for (index, text), digest, result in zip(texts, hashes, encoded, strict=True):
            first = self._open != (index, text.row)
            self._open = None if text.last else (index, text.row)
            ids = result.ids
            self.counts.rows += first
            self.counts.documents_in_blocks += first and not text.last
            if first and text.last and (not ids or not text.text.strip()):
                self.counts.dropped["empty"] += 1
                continue
            tokens = self._finish(ids, first, text.last)
            self.counts.documents += first
            self.counts.tokens += len(tokens)
            if len(tokens):
                self.counts.highest_token = max(self.counts.highest_token, int(tokens.max()))
            if self.tokenizer.unknown is not None:
                self.counts.unknown_tokens += int(np.count_nonzero(tokens == self.tokenizer.unknown))
            yield Encoded(index, text.row, text.offset, tokens, first, text.last, digest)

    def _finish(self, ids: list[int], first: bool, last: bool) -> np.ndarray:
        begin = self.tokenizer.begin
        head = [begin] if first and begin is not None and ids[:1] != [begin] else []
        tail = [self.tokenizer.end] if last and ids[-1:] != [self.tokenizer.end] else []
        return np.asarray(head + ids + tail if head or tail else ids, dtype=np.uint32)

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
