"""Readers of rows from json lists, csv and tsv, parquet and the Hub; the bounded-memory siblings of `read_jsonl`."""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from skimp.core.errors import DataError
from skimp.data.readers import BLOCK, LONGEST_LINE, Entry, Record, an_object, not_text, open_file, with_mark
from skimp.data.sources import SourceFile, hub_parts

Columns = Callable[[list[str]], list[str]] | None


def read_json(file: SourceFile, encoding: str, entry: Entry, columns: Any = None) -> Iterator[Record]:
    """A JSON list of objects, or objects one after another; never more than one of them in memory."""
    decoder, text = json.JSONDecoder(), _Growing(file, encoding)
    listed = text.next_mark() == "["
    text.at += listed
    row = 0
    while (mark := text.next_mark()) not in ("", "]"):
        if mark == "," and row:
            text.at += 1
            if text.next_mark() in ("", "]", ","):
                raise _broken(file, row + 1, text.begin(60), "a comma with nothing after it")
        row += 1
        while True:
            try:
                value, end = decoder.raw_decode(text.read, text.at)
                break
            except (ValueError, RecursionError) as error:
                # An object cut off by the end of what was read looks like a broken one: read as much again, so
                # that all attempts together cost no more than twice the last.
                if isinstance(error, RecursionError) or not text.more():
                    raise _broken(file, row, text.begin(60), str(error)[:120]) from None
        text.at = end
        value = an_object(value, f"{file.path}, row {row}")
        if row >= entry.row:
            yield Record(row, 0, value)
    if listed and mark != "]":
        raise _broken(file, row + 1, "", "the list has no end")
    text.at += mark == "]"
    if mark == "]" and (not listed or text.next_mark()):
        raise _broken(file, row + 1, text.begin(60), "something after the end")


class _Growing:
    """Decoded text of a file, `read` up to now and used up to `at`; what was used is forgotten when more is read."""

    def __init__(self, file: SourceFile, encoding: str) -> None:
        self._file, self._encoding = file, encoding
        self._handle = open_file(file)
        self._decoder = codecs.getincrementaldecoder(with_mark(encoding))()
        self._bytes = 0
        self.read = ""
        self.at = 0

    def more(self) -> bool:
        """Read at least as much as is waiting; False at the end of the file."""
        self.read, self.at = self.read[self.at :], 0
        if len(self.read) > LONGEST_LINE:
            raise DataError(self._file.path, "one object over 1 GiB", instead="smaller rows, or .jsonl")
        pending = len(self._decoder.getstate()[0])
        block = self._handle.read(max(BLOCK, len(self.read)))
        try:
            self.read += self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_text(self._file.path, self._bytes - pending + error.start, error, self._encoding) from None
        self._bytes += len(block)
        if not block:
            self._handle.close()
        return bool(block)

    def next_mark(self) -> str:
        """The next character that is no space, now at `at`; '' at the end."""
        while True:
            found = _MARK.search(self.read, self.at)
            if found:
                self.at = found.start()
                return found.group()
            self.at = len(self.read)
            if self._handle.closed or not self.more():
                return ""

    def begin(self, characters: int) -> str:
        return self.read[self.at : self.at + characters]


_MARK = re.compile(r"\S")


def _broken(file: SourceFile, row: int, begins: str, what: str) -> DataError:
    return DataError(
        f"{file.path}, row {row}: one JSON list of objects",
        what + (f"; it begins {begins!r}" if begins else ""),
        instead="[{…}, {…}], or one object a line in a file named .jsonl",
    )


def read_csv(file: SourceFile, encoding: str, entry: Entry, columns: Any = None) -> Iterator[Record]:
    """A header, then rows with as many cells; `,` in csv, a tab in tsv; RFC 4180 quotes, which may hold line breaks."""
    csv.field_size_limit(LONGEST_LINE)
    delimiter = "\t" if file.kind == "tsv" else ","
    with open_file(file) as handle, io.TextIOWrapper(handle, with_mark(encoding), newline="") as text:
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(_filled(rows, file, 0), [])
        twice = sorted({n for n in header if header.count(n) > 1})
        if twice:
            raise DataError(
                f"{file.path}: a header with every name once", f"{', '.join(map(repr, twice))} twice or more"
            )
        for row, cells in enumerate(_filled(rows, file, 1), 1):
            if len(cells) != len(header):
                raise _ragged(file, row, rows.line_num, header, cells, delimiter)
            if row >= entry.row:
                yield Record(row, 0, dict(zip(header, cells, strict=True)))


def _filled(rows: Any, file: SourceFile, first: int) -> Iterator[list[str]]:
    """The lines that hold something; what the csv module finds wrong is told with the row."""
    number = first
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{file.path}, row {number} (line {rows.line_num}): comma-separated values",
                str(error),
                "a quote is not closed, or stands within a cell that is not quoted",
                'put a cell with quotes into quotes and double those inside: "he said ""so"""',
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path}, row {number} (after line {rows.line_num}): text in {error.encoding}",
                f"byte 0x{error.object[error.start]:02x}, which is not {error.encoding}",
                error.reason,
                "data.encoding=latin-1 (or cp1252, cp949, gb18030 …) when the file is in that encoding",
            ) from None
        if cells:
            yield cells
            number += 1


def _ragged(file: SourceFile, row: int, line: int, header: list[str], cells: list[str], delimiter: str) -> DataError:
    other = next((c for c in ";\t|," if c != delimiter and c in header[0]), "") if len(header) == 1 else ""
    return DataError(
        f"{file.path}, row {row} (line {line}): {len(header)} cells, as in the header {', '.join(header)[:80]}",
        f"{len(cells)} cells, beginning {', '.join(cells)[:80]!r}",
        f"the header seems to be separated by {other!r}"
        if other
        else "a row of another length is cut at the wrong place",
        [
            "put a cell that holds the separator or a line break into double quotes",
            *([f"separate by {delimiter!r}, or name the file .tsv when it is tabs"] if other else []),
        ],
    )


def read_parquet(file: SourceFile, encoding: str, entry: Entry, columns: Columns) -> Iterator[Record]:
    import pyarrow.parquet as pq

    with tempfile.TemporaryFile() as unpacked:
        source: Any = file.path
        if file.compression:  # parquet is read from its end, so it must lie somewhere in full
            with open_file(file) as handle:
                shutil.copyfileobj(handle, unpacked, 1 << 20)
            source = unpacked
        table = pq.ParquetFile(source)
        wanted = None if columns is None else columns(table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(batch_size=1 if columns is None else 256, columns=wanted):
            if row + len(batch) < entry.row:
                row += len(batch)
                continue
            for fields in batch.to_pylist():
                row += 1
                if row >= entry.row:
                    yield Record(row, 0, {name: _present(value) for name, value in fields.items()})


def _present(value: Any) -> Any:
    """Without the keys that are null: in a column of structs every one has the keys of all."""
    if isinstance(value, dict):
        return {k: _present(v) for k, v in value.items() if v is not None}
    return [_present(v) for v in value] if isinstance(value, list) else value


def read_hub(file: SourceFile, encoding: str, entry: Entry, columns: Any = None) -> Iterator[Record]:
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
        yield Record(row, 0, {name: _present(value) for name, value in first.items()})
        first, row = next(rows, None), row + 1
