"""Read files in the child process, one row or one block of text at a time. Every complaint names file and row.

Rows are counted from 1: lines of a jsonl file, items of a json list, rows under the header of a csv or tsv file,
rows of a parquet file or a Hub dataset, topics of `pydoc`; a text file is row 1. Memory is bounded by one row; a
text file is read in blocks, however large it is.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from skimp.core.errors import DataError
from skimp.data.sources import SourceFile

#: Longer texts are tokenised in blocks: the tokenizer needs about 150 bytes a token, so 1 Mi characters cost
#: 40 MB.
BLOCK = 1 << 20
LONGEST_LINE = 1 << 30
#: Kinds of file that are text and nothing else; all others hold rows with fields.
PLAIN = ("txt", "pydoc")


@dataclass(frozen=True)
class Text:
    """A document, or a block of one: `last` is False while more of the same document follows.

    Attributes:
        row: of the file, from 1.
        offset: the byte (after decompression) where the row begins, for files that can be entered there.
        text: what is tokenised.
        last: whether the document ends here.
        trained: the characters [start, end) whose tokens are trained; None for all of them.
        cuts: characters where tokenising begins anew, as it does at inference after a prompt.
        complete: the text holds every token already (a chat template's does): none is put before or after.
        dropped: why the row is left out; such a text is empty.
    """

    row: int
    offset: int
    text: str
    last: bool = True
    trained: tuple[tuple[int, int], ...] | None = None
    cuts: tuple[int, ...] = ()
    complete: bool = False
    dropped: str = ""


@dataclass(frozen=True)
class Record:
    """A row with fields."""

    row: int
    offset: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Where to begin in a file: the first row wanted and the byte it begins at."""

    row: int = 1
    offset: int = 0


def read_plain(file: SourceFile, encoding: str, entry: Entry = Entry()) -> Iterator[Text]:
    """The documents of a text file or of `pydoc` from `entry` on.

    Raises:
        DataError: the file is broken or not text in `encoding`.
    """
    with guarded(file):
        if file.kind == "pydoc":
            from pydoc_data.topics import topics

            for row, name in enumerate(sorted(topics), 1):
                if row >= entry.row:
                    yield from cut(row, 0, [topics[name]])
        elif entry.row == 1:
            with open_file(file) as handle:
                yield from cut(1, 0, _decoded_blocks(handle, file, encoding))


def read_records(
    file: SourceFile, encoding: str, entry: Entry = Entry(), columns: Callable[[list[str]], list[str]] | None = None
) -> Iterator[Record]:
    """The rows of a file with fields, from `entry` on. Blank lines are skipped.

    Args:
        file, encoding: what to read.
        entry: where to begin.
        columns: names there -> names wanted, for files that can leave the others unread; None: all.

    Raises:
        DataError: the file is broken, or a row is malformed or not in `encoding`.
    """
    from skimp.data import tables

    readers: dict[str, Callable[..., Iterator[Record]]] = {
        "jsonl": read_jsonl,
        "json": tables.read_json,
        "csv": tables.read_csv,
        "tsv": tables.read_csv,
        "parquet": tables.read_parquet,
        "hub": tables.read_hub,
    }
    with guarded(file):
        yield from readers[file.kind](file, encoding, entry, columns)


class guarded:
    """Turns whatever a damaged file makes the libraries raise into a `DataError` that names it."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, (OSError, EOFError, zlib.error, ValueError)):
            raise DataError(
                self.file.path,
                f"cannot be read: {type(error).__name__}: {error}",
                "the file is damaged, cut short, not of the kind its name says, or not allowed to be read",
                "copy or make it again",
            ) from error


def read_jsonl(file: SourceFile, encoding: str, entry: Entry, columns: Any = None) -> Iterator[Record]:
    with open_file(file) as lines:
        _skip_to(lines, entry.offset)
        offset, row = entry.offset, entry.row - 1
        while line := lines.readline(LONGEST_LINE):
            row, begins, offset = row + 1, offset, offset + len(line)
            if len(line) == LONGEST_LINE:
                raise DataError(f"{file.path}, row {row}", "a line over 1 GiB", instead="one JSON object on each line")
            text = _decode(line, file, row, begins, encoding)
            text = text.removeprefix("\ufeff") if row == 1 else text
            if text.strip():
                yield Record(row, begins, _parse(text, file, row))


def open_file(file: SourceFile) -> Any:
    """The bytes of a file after decompression."""
    if file.compression == "gz":
        return gzip.open(file.path, "rb")
    if file.compression == "zst":
        import pyarrow as pa  # Python before 3.14 has no zstd of its own

        return io.BufferedReader(pa.input_stream(file.path, compression="zstd"), 1 << 20)
    return open(file.path, "rb")


def _skip_to(handle: IO[bytes], offset: int) -> None:
    """Seek where the stream can, read and forget where it cannot (zstd)."""
    if handle.seekable():
        handle.seek(offset)
        return
    while offset > 0 and (block := handle.read(min(offset, 1 << 20))):
        offset -= len(block)


def _decoded_blocks(handle: IO[bytes], file: SourceFile, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(with_mark(encoding))()
    read = 0
    while True:
        waiting = decoder.getstate()[0]
        block = handle.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_text(f"{file.path}, row 1", read - len(waiting) + error.start, error, encoding) from None
        read += len(block)
        if text:
            yield text
        if not block:
            return


def cut(row: int, offset: int, parts: Iterable[str]) -> Iterator[Text]:
    """One document as blocks of at most `BLOCK` characters, cut after a line break that a word follows:
    pre-tokenizers begin a new word there, so the tokens are those of the whole text. Only text without any
    such place within a block is cut elsewhere."""
    waiting = ""
    for part in parts:
        waiting += part
        while len(waiting) > BLOCK:
            at = waiting.rfind("\n", 0, BLOCK)
            while at > 0 and waiting[at + 1].isspace():
                at = waiting.rfind("\n", 0, at)
            at = at + 1 if at > 0 else BLOCK
            yield Text(row, offset, waiting[:at], last=False)
            waiting = waiting[at:]
    yield Text(row, offset, waiting)


def _decode(line: bytes, file: SourceFile, row: int, offset: int, encoding: str) -> str:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        raise not_text(f"{file.path}, row {row}", offset + error.start, error, encoding) from None


def not_text(where: str, offset: int, error: UnicodeDecodeError, encoding: str) -> DataError:
    """Bytes that are not of the encoding, with their place."""
    return DataError(
        f"{where}: text in {encoding}",
        f"byte 0x{error.object[error.start]:02x} at byte offset {offset}, which is not {encoding}",
        error.reason,
        [
            "data.encoding=latin-1 (or cp1252, cp949, gb18030 …) when the file is in that encoding",
            f"convert it once: iconv -f latin1 -t utf-8 {where.rsplit(', row', 1)[0]} > new-file",
        ],
    )


def _parse(text: str, file: SourceFile, row: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file.path}, row {row}: a JSON object on one line",
            f"{str(error)[:120]}; the line begins {text[:60]!r}",
            instead="one JSON object a line; a file that is one JSON list is named .json",
        ) from None
    return an_object(value, f"{file.path}, row {row}")


def an_object(value: Any, where: str) -> dict[str, Any]:
    """`value`, or the complaint that it is no JSON object."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON object", f"a JSON {type(value).__name__}", instead='{"text": "…"}')
    return value


def with_mark(encoding: str) -> str:
    """UTF-8 files may begin with a byte-order mark, which is no text."""
    return "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
