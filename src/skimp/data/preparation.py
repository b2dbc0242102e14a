"""From a description to text that is ready: find files, tokenise in a child what is not in the cache, lay the
rows.

This process imports numpy and torch only; tokenizers, pyarrow, datasets and transformers stay in the child.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError
from skimp.data.assembly import held_rule, name_of_held, stored_text, streamed_text
from skimp.data.child import Progress, run_to_end
from skimp.data.fingerprint import cache_folder, content_key, source_records, tokenizer_fingerprint
from skimp.data.prepared import PreparedText
from skimp.data.sources import Source, find_sources
from skimp.data.store import TokenStore, is_complete
from skimp.data.textdata import TextData, TrainSource
from skimp.data.vocabulary import check_vocabulary


def prepare(
    data: TextData,
    tokenizer: str | Path,
    vocabulary: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    end: str | int | None = None,
) -> PreparedText:
    """Make text ready for training.

    Args:
        data: what to read and how.
        tokenizer: a model folder, a tokenizer.json or a GGUF file.
        vocabulary: token embeddings of the model; tokens beyond are refused.
        cache: where tokens are kept; None: `SKIMP_CACHE` or ~/.cache/skimp.
        progress: called about once a second with {"set", "file", "files_done", "files", "rows", "tokens"}.
        end: the end-of-document token or id; None: the tokenizer's own.

    Raises:
        DataError: a source is missing, empty, malformed or not text (names file and row), or nothing is left.
        ModelError: the tokenizer cannot be read, or does not go with the model.
    """
    cache = cache or cache_folder()
    _make_room(cache)
    fingerprint = tokenizer_fingerprint(str(tokenizer), cache)
    job = {
        "tokenizer": str(tokenizer),
        "kept_tokenizer": str(cache / "tokenizers" / fingerprint) if not _is_ready(tokenizer) else None,
        "end": end,
        "field": data.field,
        "encoding": data.encoding,
        "rules": data.rules.as_dict(),
    }
    rules = {"rows": job["rules"], "encoding": data.encoding, "end": end}
    parts = [[_found(entry, data) for entry in part] for part in data.parts]
    names = [part[0].label if data.weights else "train" for part in data.parts]
    wanted: dict[str, dict[str, Any]] = {}
    for name, part in zip(names, parts, strict=True):
        sources = [source for found in part for source in found]
        if not data.streaming:
            wanted[f"train {name}"] = _store_job("train", sources, cache, fingerprint, rules)
        elif data.held_out:
            wanted[name_of_held(name)] = _store_job("validation", sources, cache, fingerprint, rules, held_rule(data))
    for name, listed in data.validation_sets.items():
        key = "data.validation" if name == "validation" else f"data.validation.{name}"
        wanted[name] = _store_job(name, find_sources(listed, key), cache, fingerprint, rules)
    stores, reused = _made(wanted, job, progress)
    if vocabulary is not None:
        for store in stores.values():
            _check_vocabulary(store, vocabulary)
    if data.streaming:
        listed_parts = [[source for found in part for source in found] for part in parts]
        return streamed_text(data, names, listed_parts, stores, reused, job, [fingerprint, rules], vocabulary)
    return stored_text(data, names, stores, reused)


def _found(entry: TrainSource, data: TextData) -> list[Source]:
    """The files of an entry, each source with the format its rows are said to have. An entry of several sources is
    one source by its label in a mixture."""
    found = find_sources(entry.sources, "data.train")
    if data.weights is not None or len(found) > 1:
        files = tuple(file for source in found for file in source.files)
        found = [Source(entry.label, files, sum(source.ignored for source in found))]
    return [replace(source, name=entry.label, format=entry.format or "") for source in found]


def _made(
    wanted: dict[str, dict[str, Any]], job: dict[str, Any], progress: Progress | None
) -> tuple[dict[str, TokenStore], dict[str, bool]]:
    """The stores, by name, and which were in the cache already."""
    reused = {k: is_complete(Path(w["folder"])) for k, w in wanted.items()}
    missing = {w["folder"]: w for k, w in wanted.items() if not reused[k]}
    for folder in missing:  # the same text for two sets is made once; what is damaged is made again
        shutil.rmtree(folder, ignore_errors=True)
    if missing:
        run_to_end({**job, "stores": list(missing.values())}, progress)
    stores = {k: TokenStore(Path(w["folder"])) for k, w in wanted.items()}
    for key, job_ in wanted.items():  # the same text may have been found before under other names
        for record, source in zip(stores[key].meta["sources"], job_["sources"], strict=True):
            record["name"], record["ignored"] = source["name"], source["ignored"]
            for file, now in zip(record["files"], source["files"], strict=True):
                file["path"] = now["path"]
    return stores, reused


def _check_vocabulary(store: TokenStore, vocabulary: int) -> None:
    meta = store.meta
    place = ", ".join(s["name"] for s in meta["sources"])
    highest = max(meta["counts"]["highest_token"], meta["tokenizer"]["end"])
    check_vocabulary(highest, meta["tokenizer"]["size"], vocabulary, place)


def _store_job(
    name: str,
    sources: Sequence[Source],
    cache: Path,
    fingerprint: str,
    rules: dict[str, Any],
    hold: dict[str, Any] | None = None,
) -> dict[str, Any]:
    records = source_records(sources, cache, streamed=hold is not None)
    key = content_key(records, fingerprint, {**rules, "formats": [s.format for s in sources], "hold": hold})
    return {
        "set": name, "folder": str(cache / "tokens" / key), "key": key, "records": records, "hold": hold,
        "sources": [s.as_dict() for s in sources], "tokenizer_fingerprint": fingerprint,
    }  # fmt: skip


def _is_ready(tokenizer: str | Path) -> bool:
    """Whether the child can read it directly, with nothing to convert and keep."""
    path = Path(tokenizer)
    return path.suffix == ".json" or (path / "tokenizer.json").is_file()


def _make_room(cache: Path) -> None:
    """Have the cache folder, and clear what a killed child left behind in it more than a day ago."""
    try:
        (cache / "tokens").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the token cache {cache}",
            f"cannot be made: {error.strerror}",
            instead="set SKIMP_CACHE to a folder that can be written",
        ) from None
    for aside in (cache / "tokens").glob("*.aside-*"):
        if time.time() - aside.stat().st_mtime > 86_400:
            shutil.rmtree(aside, ignore_errors=True)
