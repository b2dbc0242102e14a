"""Content keys: the same text and tokenizer are tokenised once, and any change of either is seen."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError, ModelError
from skimp.data.sources import Source

#: Written into every store; a store of another format is made again.
FORMAT = 3
#: What decides how a tokenizer cuts text. Weights beside them do not.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "vocab.txt", "chat_template.jinja",
)  # fmt: skip


def cache_folder() -> Path:
    """`SKIMP_CACHE`, or `~/.cache/skimp`."""
    return Path(os.environ.get("SKIMP_CACHE") or Path.home() / ".cache" / "skimp")


def digest_of(record: Any) -> str:
    """SHA-256 of the canonical JSON of `record`, in hex."""
    return hashlib.sha256(json.dumps(record, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def file_record(path: str, cache: Path) -> dict[str, Any]:
    """Size, mtime and SHA-256 of a file. The hash is remembered by (path, size, mtime), so that a run on 100
    GB of text does not read it again only to find that nothing changed."""
    status = os.stat(path)
    memo = cache / "hashes" / (hashlib.sha256(os.path.abspath(path).encode()).hexdigest() + ".json")
    seen = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    if memo.exists():
        try:
            old = json.loads(memo.read_text())
        except ValueError:
            old = {}  # a half-written memo is only a reason to hash again
        if {k: old.get(k) for k in seen} == seen and "sha256" in old:
            return {"path": path, **old}
    sha = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha.update(block)
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}") from None
    record = {**seen, "sha256": sha.hexdigest()}
    # A file touched within the last two seconds may change again within the same tick of its mtime: do not
    # remember.
    if time.time_ns() - status.st_mtime_ns > 2_000_000_000:
        memo.parent.mkdir(parents=True, exist_ok=True)
        aside = memo.with_name(f"{memo.name}.{os.getpid()}")
        aside.write_text(json.dumps(record))
        os.replace(aside, memo)
    return {"path": path, **record}


def glimpse(path: str) -> str:
    """Size and hash of the first and last 64 KiB: streaming is for text too large to read beforehand."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        return f"{size}:{hashlib.sha256(head + file.read()).hexdigest()}"


def source_records(sources: Sequence[Source], cache: Path, streamed: bool = False) -> list[dict[str, Any]]:
    """For each source its files with their hashes, or (`streamed`) a glimpse of each. A Hub dataset is known by its
    address: pin `@revision`."""

    def record(path: str) -> dict[str, Any]:
        return {"path": path, "sha256": glimpse(path)} if streamed else file_record(path, cache)

    records = []
    for source in sources:
        files = [{"kind": f.kind, **({"path": f.path} if f.kind == "hub" else record(f.path))} for f in source.files]
        records.append({"name": source.name, "ignored": source.ignored, "files": files})
    return records


def content_key(records: Sequence[dict[str, Any]], tokenizer: str, rules: dict[str, Any]) -> str:
    """The name of a store: 32 hex digits over the bytes of the text (not its place or date), tokenizer and
    rules.
    """
    content = [[f.get("sha256", f["path"]) + f["kind"] for f in record["files"]] for record in records]
    return digest_of({"format": FORMAT, "content": content, "tokenizer": tokenizer, "rules": rules})[:32]


def tokenizer_fingerprint(location: str, cache: Path) -> str:
    """Hash of the tokenizer's own files (folder), or of the whole file (GGUF, tokenizer.json), and of the
    versions of the packages that read it.

    Raises:
        ModelError: nothing there that could be a tokenizer.
    """
    if os.path.isdir(location):
        paths = [os.path.join(location, n) for n in TOKENIZER_FILES if os.path.isfile(os.path.join(location, n))]
    elif os.path.isfile(location):
        paths = [location]
        paths += [p for p in (os.path.join(os.path.dirname(location), n) for n in TOKENIZER_FILES[1:3])
                  if location.endswith(".json") and os.path.isfile(p)]  # fmt: skip
    else:
        paths = []
    if not paths:
        raise ModelError(
            f"tokenizer: {location}",
            "no tokenizer there" if os.path.exists(location) else "no such file or folder",
            instead="a folder with tokenizer.json, vocab.json + merges.txt or tokenizer.model; a GGUF file",
        )
    versions = {p: importlib.metadata.version(p) for p in ("tokenizers", "transformers")}
    return digest_of([[os.path.basename(p), file_record(p, cache)["sha256"]] for p in paths] + [versions])[:32]
