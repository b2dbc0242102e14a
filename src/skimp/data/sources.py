"""From what the user named to the files to read, checked in milliseconds and without reading them."""

from __future__ import annotations

import difflib
import glob
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError

KINDS = ("jsonl", "json", "parquet", "csv", "tsv", "txt")
SUFFIXES = tuple(f".{kind}{packed}" for kind in KINDS for packed in ("", ".gz", ".zst"))
KINDS_READ = f"kinds that are read: {', '.join('.' + k for k in KINDS)}, each also with .gz or .zst after it"
HUB = re.compile(
    r"(?:hub:)?(?P<name>[\w.-]+(?:/[\w.-]+)?)"
    r"(?::(?P<config>[^@#]+))?(?:@(?P<revision>[^#]+))?(?:#(?P<split>.+))?"
)


@dataclass(frozen=True)
class SourceFile:
    """One thing to read. `kind` is one of `KINDS`, pydoc or hub; `path` is the address for the last."""

    kind: str
    path: str
    compression: str = ""

    @classmethod
    def of(cls, path: str) -> SourceFile:
        name, compression = path, ""
        for ending in ("gz", "zst"):
            if name.endswith("." + ending):
                name, compression = name[: -len(ending) - 1], ending
        return cls(name.rsplit(".", 1)[-1], path, compression)


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation`: its files in reading order, and how many others lay
    there.
    """

    name: str
    files: tuple[SourceFile, ...]
    ignored: int = 0
    format: str = ""  # of its rows, where it is said for this source alone

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Source:
        return cls(
            record["name"], tuple(SourceFile(**f) for f in record["files"]), record["ignored"], record.get("format", "")
        )


def find_sources(names: Sequence[str], key: str) -> list[Source]:
    """The files behind each name, in sorted order within a folder or glob.

    Args:
        names: what the user wrote.
        key: the recipe key, for messages.

    Raises:
        DataError: a file is missing (with near names), empty, or of a kind that is not read.
    """
    return [_find(name, key) for name in names]


def _find(name: str, key: str) -> Source:
    path = os.path.expanduser(name)
    if name == "pydoc" and not os.path.exists(path):
        return Source(name, (SourceFile("pydoc", pydoc_path()),))
    if name.startswith("hub:"):
        return _hub(name, key)
    if os.path.isdir(path):
        inside = sorted(p for p in Path(path).rglob("*") if p.is_file() and not p.name.startswith("."))
        return _collect(name, key, [str(p) for p in inside], f"folder {path}")
    if os.path.isfile(path):
        return Source(name, (_file(path, key),))
    if any(c in name for c in "*?["):
        matched = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
        return _collect(name, key, matched, f"pattern {path}")
    # 'owner/name' is a Hub dataset unless its first part is a folder here: then it is a path with a mistake
    # in it.
    looks_like_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+(?:[:@#].*)?", name) and not name.endswith(SUFFIXES)
    if looks_like_hub and not os.path.isdir(name.split("/")[0]):
        return _hub(name, key)
    raise _missing(name, path, key)


def pydoc_path() -> str:
    """Where the language reference of this Python lies; found without importing its 0.8 MB of text."""
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None or spec.origin is None:
        raise DataError(
            "pydoc: the language reference that ships with Python",
            "this Python has no module pydoc_data.topics",
            "some distributions package it apart",
            "install the full Python, or name a text file",
        )
    return spec.origin


def hub_parts(address: str) -> dict[str, str | None]:
    """'hub:owner/name:config@revision#split' -> its parts; split defaults to 'train'."""
    match = HUB.fullmatch(address)
    if match is None:
        raise DataError(f"{address}: a Hub dataset", "not an address", instead="owner/name[:config][@revision][#split]")
    parts = match.groupdict()
    return {**parts, "split": parts["split"] or "train"}


def _hub(name: str, key: str) -> Source:
    hub_parts(name)
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"{key}: {name}",
            "no such file or folder, and for a Hub dataset the package `datasets` is not installed",
            instead=["pip install 'skimp[hub]'", "name a local file, folder or glob"],
        )
    return Source(name, (SourceFile("hub", name),))


def _file(path: str, key: str, among_others: bool = False) -> SourceFile:
    if not path.endswith(SUFFIXES):
        raise DataError(
            f"{key}: {path}",
            f"a file ending in '{Path(path).suffix}'",
            "its kind is told by its name",
            KINDS_READ,
        )
    if os.path.getsize(path) == 0 and not (among_others and ".txt" in path):
        raise DataError(f"{key}: {path}", "an empty file (0 bytes)", instead="write it again, or name another file")
    return SourceFile.of(path)


def _collect(name: str, key: str, paths: list[str], where: str) -> Source:
    wanted = [p for p in paths if p.endswith(SUFFIXES)]
    if not wanted:
        endings = sorted({Path(p).suffix or "(no suffix)" for p in paths})
        raise DataError(
            f"{key}: {where}",
            f"{len(paths)} files, endings {', '.join(endings[:10])}" if paths else "nothing there",
            "none is of a kind that is read",
            KINDS_READ,
        )
    return Source(name, tuple(_file(p, key, among_others=True) for p in wanted), len(paths) - len(wanted))


def _missing(name: str, path: str, key: str) -> DataError:
    folder = os.path.dirname(path) or "."
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder) or "."
    there = sorted(os.listdir(folder))
    near = difflib.get_close_matches(os.path.basename(path), there, n=3, cutoff=0.5)
    ways = [f"did you mean {os.path.join(folder, n)}?" for n in near]
    if difflib.get_close_matches(name, ["pydoc"], cutoff=0.6):
        ways.append("did you mean 'pydoc', the Python language reference?")
    if not ways and there:
        ways.append(f"{folder} holds: {', '.join(there[:10])}{', …' if len(there) > 10 else ''}")
    return DataError(f"{key}: {name}", "no such file, folder, glob or dataset", instead=ways)
