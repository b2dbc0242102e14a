"""Tokens on disk: a folder that is complete or absent.

    tokens.bin      the tokens of all documents, end to end; uint16 when every id of the tokenizer fits, else
    uint32
    trained.bin     one bit a token, the lowest of a byte first: whether the token is trained; absent when all are
    documents.npy   int64, documents + 1 offsets into it
    rows.npy        int64, the row of each document in its file
    digests.npy     uint64, a hash of each document's text
    meta.json       counts, sources with hashes, tokenizer, format

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

STRETCH = 1 << 20  # tokens whose bits are counted at once
COLUMNS = {"documents": np.int64, "rows": np.int64, "digests": np.uint64}


class TokenStore:
    """A complete store, opened for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        self.dtype = np.dtype(self.meta["dtype"])
        self.masked = bool(self.meta["masked"])
        self._files: dict[str, int] = {}

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
        size = self.dtype.itemsize
        return np.frombuffer(self._bytes("tokens.bin", start * size, length * size), dtype=self.dtype)

    def trained(self, start: int, length: int) -> np.ndarray | None:
        """(length,) bool, whether each of the tokens is trained; None when all of the store are."""
        if not self.masked:
            return None
        first = start // 8
        packed = self._bytes("trained.bin", first, -(-(start + length) // 8) - first)
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return bits[start - 8 * first :][:length].astype(bool)

    def trained_before(self, places: np.ndarray) -> np.ndarray:
        """(n,) int64: trained tokens before each of the places, in one pass over the bits and bounded memory."""
        out = np.empty(len(places), np.int64)
        order = np.argsort(places, kind="stable")
        sorted_places, done, before = places[order], 0, 0
        for start in range(0, self.tokens + 1, STRETCH):
            bits = self.trained(start, min(STRETCH, self.tokens - start))
            ranks = np.append(0, np.cumsum(np.ones(0) if bits is None else bits))
            until = int(np.searchsorted(sorted_places, start + STRETCH))
            out[order[done:until]] = before + ranks[sorted_places[done:until] - start]
            done, before = until, before + int(ranks[-1])
        return out

    def _bytes(self, name: str, start: int, length: int) -> bytes:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            weakref.finalize(self, os.close, self._files[name])
        data = os.pread(self._files[name], length, start)
        if len(data) != length:
            raise DataError(
                f"{self.folder}: bytes {start} to {start + length} of {name}",
                f"only {len(data)} of {length} bytes",
                "the file was changed or cut while it was in use",
                f"delete {self.folder} and start again: it is made again from the text",
            )
        return data

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
        bits = os.path.getsize(folder / "trained.bin") if meta["masked"] else 0
        whole = bits == (-(-meta["counts"]["tokens"] // 8) if meta["masked"] else 0)
    except (OSError, ValueError, KeyError):
        return False
    return bool(meta["format"] == FORMAT and size == wanted and columns and whole)


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
        self._trained: Any = None  # opened at the first token that is not trained
        self._bits = np.zeros(0, bool)  # of the byte that is not full yet

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for file in (self._bin, self._trained, *self._raw.values()):
            if file is not None:
                file.close()
        shutil.rmtree(self.aside, ignore_errors=True)

    def add(self, tokens: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Tokens of the document being written, and which are trained (bool; None: all)."""
        if trained is not None and self._trained is None:
            self._trained = open(self.aside / "trained.bin", "wb")  # noqa: SIM115 - lives as long as the writer
            whole, rest = divmod(self.tokens, 8)
            for start in range(0, whole, STRETCH):
                self._trained.write(b"\xff" * min(STRETCH, whole - start))
            self._bits = np.ones(rest, bool)
        if self._trained is not None:
            self._mark(np.ones(len(tokens), bool) if trained is None else trained)
        self._bin.write(tokens.astype(self.dtype).tobytes())
        self.tokens += len(tokens)

    def end_document(self, row: int, digest: int) -> None:
        self.documents += 1
        self._put("documents", self.tokens)
        self._put("rows", row)
        self._put("digests", digest)

    def _mark(self, trained: np.ndarray) -> None:
        bits = np.concatenate([self._bits, trained])
        whole = len(bits) // 8 * 8
        self._trained.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._bits = bits[whole:]

    def commit(self, meta: dict[str, Any]) -> None:
        """Flush, then rename. When another process made the same store meanwhile, theirs stays."""
        if self._trained is not None:
            self._trained.write(np.packbits(self._bits, bitorder="little").tobytes())
        for file in (self._bin, self._trained):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        for name, raw in self._raw.items():
            raw.close()
            self._to_npy(name, self.documents + (name == "documents"))
        record = {"format": FORMAT, "dtype": self.dtype.name, "masked": self._trained is not None, **meta}
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
