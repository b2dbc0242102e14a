"""Tokens on disk: a folder that is complete or absent.

    tokens.bin      the tokens of all documents, end to end; uint16 when every id of the tokenizer fits, else
    uint32 documents.npy   int64, documents + 1 offsets into it rows.npy        int64, the row of each
    document in its file digests.npy     uint64, a hash of each document's text meta.json       counts,
    sources with hashes, tokenizer, format

The layout can be memory-mapped. The training process reads it with `pread` instead: pages of a map that were
touched count as resident memory of the process, and a run with a budget would pay for the whole file by the
end of an epoch.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from skimp.core.errors import DataError
from skimp.data.fingerprint import FORMAT

COLUMNS = {"documents": np.int64, "rows": np.int64, "digests": np.uint64}


class TokenStore:
    """A complete store, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        self.dtype = np.dtype(self.meta["dtype"])
        self._file: int | None = None

    @property
    def documents(self) -> int:
        return int(self.meta["counts"]["documents"])

    @property
    def tokens(self) -> int:
        return int(self.meta["counts"]["tokens"])

    def column(self, name: str) -> np.ndarray:
        """One of `documents` (offsets), `rows`, `digests`, read into memory: 8 bytes per document."""
        column: np.ndarray = np.load(self.folder / f"{name}.npy")
        return column

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) in the store's dtype."""
        if self._file is None:
            self._file = os.open(self.folder / "tokens.bin", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        size = self.dtype.itemsize
        data = os.pread(self._file, length * size, start * size)
        if len(data) != length * size:
            raise DataError(
                f"{self.folder}: tokens {start} to {start + length}",
                f"only {len(data)} of {length * size} bytes",
                "the file was changed or cut while it was in use",
                f"delete {self.folder} and start again: it is made again from the text",
            )
        return np.frombuffer(data, dtype=self.dtype)

    def place(self, document: int) -> str:
        """'file, row n' of a document, for messages."""
        row = int(np.load(self.folder / "rows.npy", mmap_mode="r")[document])
        for source in reversed(self.meta["sources"]):
            for file in reversed(source["files"]):
                if document >= file["first_document"]:
                    return f"{file['path']}, row {row}"
        raise IndexError(document)

    def source_of(self, documents: np.ndarray) -> np.ndarray:
        """The source id of each document: the place of its source in the list, int32."""
        firsts = np.array([s["files"][0]["first_document"] for s in self.meta["sources"]], dtype=np.int64)
        return (np.searchsorted(firsts, documents, side="right") - 1).astype(np.int32)


def is_complete(folder: Path) -> bool:
    """Whether a store of this format is there with the sizes its meta.json states."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        size = os.path.getsize(folder / "tokens.bin")
        wanted = meta["counts"]["tokens"] * np.dtype(meta["dtype"]).itemsize
        columns = all((folder / f"{name}.npy").exists() for name in COLUMNS)
    except (OSError, ValueError, KeyError):
        return False
    return bool(meta["format"] == FORMAT and size == wanted and columns)


class StoreWriter:
    """Writes a store aside, flushes it to the disk and renames it into place as the last act.

    Used as a context manager: leaving it with an error removes what was written.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.aside-", dir=folder.parent))
        self.dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        self.tokens = 0
        self.documents = 0
        self._bin = open(self.aside / "tokens.bin", "wb")  # noqa: SIM115 - lives as long as the writer
        # Columns grow with the documents, so they go to disk as they come; the .npy header, which needs their
        # number, is put before them at the end.
        self._raw = {name: open(self.aside / f"{name}.raw", "wb") for name in COLUMNS}  # noqa: SIM115
        self._put("documents", 0)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for file in (self._bin, *self._raw.values()):
            file.close()
        shutil.rmtree(self.aside, ignore_errors=True)

    def add(self, tokens: np.ndarray) -> None:
        """Tokens of the document being written."""
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self.tokens += len(tokens)

    def end_document(self, row: int, digest: int) -> None:
        self.documents += 1
        self._put("documents", self.tokens)
        self._put("rows", row)
        self._put("digests", digest)

    def commit(self, meta: dict[str, Any]) -> None:
        """Flush, then rename. When another process made the same store meanwhile, theirs stays."""
        self._bin.flush()
        os.fsync(self._bin.fileno())
        for name, raw in self._raw.items():
            raw.close()
            self._to_npy(name, self.documents + (name == "documents"))
        record = {"format": FORMAT, "dtype": self.dtype.name, **meta}
        with open(self.aside / "meta.json", "w") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.aside)
        try:
            os.rename(self.aside, self.folder)
        except OSError:
            if not is_complete(self.folder):
                raise
        _sync_folder(self.folder.parent)

    def _put(self, name: str, value: int) -> None:
        self._raw[name].write(np.array(value, dtype=COLUMNS[name]).tobytes())

    def _to_npy(self, name: str, length: int) -> None:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(COLUMNS[name])), "fortran_order": False}
        raw = self.aside / f"{name}.raw"
        with open(self.aside / f"{name}.npy", "wb") as target, open(raw, "rb") as source:
            np.lib.format.write_array_header_1_0(target, {**header, "shape": (length,)})
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        raw.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
