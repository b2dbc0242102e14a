"""Read documents from files, one at a time, in the child process. Every complaint names file and row.

Rows are counted from 1: lines of a jsonl file, rows of a parquet file or a Hub dataset, topics of `pydoc`; a
text file is row 1. Memory is bounded by one row; a text file is read in blocks, however large it is.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from skimp.core.errors import DataError
from skimp.data.sources import SourceFile, hub_parts

#: Longer texts are tokenised in blocks: the tokenizer needs about 150 bytes a token, so 1 Mi characters cost
#: 40 MB.
BLOCK = 1 << 20
LONGEST_LINE = 1 << 30


@dataclass(frozen=True)
class Text:
    """A document, or a block of one: `last` is False while more of the same document follows.

    `offset` is the byte (after decompression) where the row begins, for files that can be entered there.
    """

    row: int
    offset: int
    text: str
    last: bool = True


@dataclass(frozen=True)
class Entry:
    """Where to begin in a file: the first row wanted and the byte it begins at."""

    row: int = 1
    offset: int = 0


def read_texts(file: SourceFile, field: str, encoding: str, entry: Entry = Entry()) -> Iterator[Text]:
    """The documents of one file from `entry` on. Blank lines of jsonl files are skipped.

    Raises:
        DataError: the file is broken, or a row is malformed, lacks `field`, or is not text.
    """
    reader: Callable[..., Iterator[Text]] = READERS[file.kind]
    try:
        yield from reader(file, field, encoding, entry)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            file.path,
            f"cannot be read: {type(error).__name__}: {error}",
            "the file is damaged, cut short, not of the kind its name says, or not allowed to be read",
            "copy or make it again",
        ) from error


def read_jsonl(file: SourceFile, field: str, encoding: str, entry: Entry) -> Iterator[Text]:
    with _open(file) as lines:
        _skip_to(lines, entry.offset)
        offset, row = entry.offset, entry.row - 1
        while line := lines.readline(LONGEST_LINE):
            row, begins, offset = row + 1, offset, offset + len(line)
            if len(line) == LONGEST_LINE:
                raise DataError(f"{file.path}, row {row}", "a line over 1 GiB", instead="one JSON object on each line")
            text = _decode(line, file, row, begins, encoding)
            text = text.removeprefix("\ufeff") if row == 1 else text
            if text.strip():
                yield from _cut(row, begins, [_field_of(_parse(text, file, row), field, file, row)])


def read_txt(file: SourceFile, field: str, encoding: str, entry: Entry) -> Iterator[Text]:
    if entry.row > 1:
        return
    with _open(file) as handle:
        yield from _cut(1, 0, _decoded_blocks(handle, file, encoding))


def read_parquet(file: SourceFile, field: str, encoding: str, entry: Entry) -> Iterator[Text]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file.path)
    names = table.schema_arrow.names
    if field not in names:
        raise _no_field(file.path, field, names)
    row = 0
    for batch in table.iter_batches(batch_size=256, columns=[field]):
        if row + len(batch) < entry.row:
            row += len(batch)
            continue
        for value in batch.column(0).to_pylist():
            row += 1
            if row >= entry.row:
                yield from _cut(row, 0, [_field_of({field: value}, field, file, row)])


def read_pydoc(file: SourceFile, field: str, encoding: str, entry: Entry) -> Iterator[Text]:
    from pydoc_data.topics import topics

    for row, name in enumerate(sorted(topics), 1):
        if row >= entry.row:
            yield from _cut(row, 0, [topics[name]])


def read_hub(file: SourceFile, field: str, encoding: str, entry: Entry) -> Iterator[Text]:
    parts = hub_parts(file.path)
    try:
        import datasets

        data = datasets.load_dataset(
            parts["name"], parts["config"], split=parts["split"], revision=parts["revision"], streaming=True
        )
        rows = iter(data.skip(entry.row - 1) if entry.row > 1 else data)
        first = next(rows, None)
    except Exception as error:
        # Whatever the hub's client raises, a person needs the same three facts: which data set, what it said,
        # what to do.
        offline = [k for k in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(k) == "1"]
        raise DataError(
            f"{file.path}: a Hub dataset",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            f"{' and '.join(offline)} is set" if offline else "no file or folder has that name either",
            [
                "check name, split and network",
                "download it once as jsonl or parquet and name that file or folder",
            ],
        ) from error
    row = entry.row
    while first is not None:
        yield from _cut(row, 0, [_field_of(first, field, file, row)])
        first, row = next(rows, None), row + 1


READERS = {
    "jsonl": read_jsonl,
    "txt": read_txt,
    "parquet": read_parquet,
    "pydoc": read_pydoc,
    "hub": read_hub,
}


def _open(file: SourceFile) -> Any:
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
    decoder = codecs.getincrementaldecoder("utf-8-sig" if _is_utf8(encoding) else encoding)()
    read = 0
    while True:
        waiting = decoder.getstate()[0]
        block = handle.read(BLOCK)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise _not_text(f"{file.path}, row 1", read - len(waiting) + error.start, error, encoding) from None
        read += len(block)
        if text:
            yield text
        if not block:
            return


def _cut(row: int, offset: int, parts: Iterable[str]) -> Iterator[Text]:
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
        raise _not_text(f"{file.path}, row {row}", offset + error.start, error, encoding) from None


def _not_text(where: str, offset: int, error: UnicodeDecodeError, encoding: str) -> DataError:
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
            instead="one JSON object a line; for one JSON list: jq -c '.[]' old > new.jsonl",
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{file.path}, row {row}: a JSON object",
            f"a JSON {type(value).__name__}",
            instead='{"text": "…"}',
        )
    return value


def _field_of(record: dict[str, Any], field: str, file: SourceFile, row: int) -> str:
    if field not in record:
        raise _no_field(f"{file.path}, row {row}", field, list(record))
    value = record[field]
    if not isinstance(value, str):
        strings = [k for k, v in record.items() if isinstance(v, str)]
        raise DataError(
            f"{file.path}, row {row}: text in the field '{field}'",
            "null" if value is None else f"a value of type {type(value).__name__}: {repr(value)[:60]}",
            instead=[f"data.field={k}" for k in strings[:3]] or "leave such rows out of the file, or make them text",
        )
    return value


def _no_field(where: str, field: str, there: list[str]) -> DataError:
    return DataError(
        f"{where}: the field '{field}'",
        f"fields there: {', '.join(map(str, there[:20])) or 'none'}",
        instead=[f"data.field={k}" for k in there[:3]] or "another file",
    )


def _is_utf8(encoding: str) -> bool:
    return codecs.lookup(encoding).name == "utf-8"
