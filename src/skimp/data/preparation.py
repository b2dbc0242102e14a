"""From a description to text that is ready: find files, tokenise in a child what is not in the cache, lay the
rows.

This process imports numpy and torch only; tokenizers, pyarrow, datasets and transformers stay in the child.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError
from skimp.data.child import Progress, run_to_end
from skimp.data.fingerprint import (
    cache_folder,
    content_key,
    digest_of,
    source_records,
    tokenizer_fingerprint,
)
from skimp.data.prepared import (
    PreparedText,
    cap_validation,
    rows_from_store,
    shared_texts,
    split_store,
)
from skimp.data.report import DataReport, SetReport
from skimp.data.rows import Rows
from skimp.data.sources import Source, find_sources
from skimp.data.store import TokenStore, is_complete
from skimp.data.streaming import StreamedText
from skimp.data.textdata import TextData, TooLong
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
    sources = {"train": find_sources(data.sources("train"), "data.train")}
    if data.sources("validation"):
        sources["validation"] = find_sources(data.sources("validation"), "data.validation")
    wanted = {k: _store_job(k, s, cache, fingerprint, rules) for k, s in sources.items() if _stored(k, data)}
    reused = {k: is_complete(Path(w["folder"])) for k, w in wanted.items()}
    missing = {w["folder"]: w for k, w in wanted.items() if not reused[k]}
    for folder in missing:  # same text for both sets is made once; what is damaged is made again
        shutil.rmtree(folder, ignore_errors=True)
    if missing:
        run_to_end({**job, "stores": list(missing.values())}, progress)
    stores = {k: TokenStore(Path(w["folder"])) for k, w in wanted.items()}
    if vocabulary is not None:
        for store in stores.values():
            meta = store.meta
            place = ", ".join(s["name"] for s in meta["sources"])
            highest = max(meta["counts"]["highest_token"], meta["tokenizer"]["end"])
            check_vocabulary(highest, meta["tokenizer"]["size"], vocabulary, place)
    if data.streaming:
        return _streaming(data, job, sources["train"], stores.get("validation"), reused, fingerprint, rules, vocabulary)
    return _stored_text(data, stores, reused)


def _stored_text(data: TextData, stores: dict[str, TokenStore], reused: dict[str, bool]) -> PreparedText:
    store, notes = stores["train"], []
    mask, train_words, validation_words = split_store(store, data) if data.held_out else (None, "", "")
    train, train_report = rows_from_store(
        store, data, "train", reused["train"], None if mask is None else ~mask, train_words
    )
    validation, validation_report = None, None
    digests = store.column("digests")
    if mask is not None:
        validation, validation_report = rows_from_store(
            store, data, "validation", reused["train"], mask, validation_words
        )
        notes = shared_texts(digests[~mask], digests[mask])
    elif "validation" in stores:
        other = stores["validation"]
        validation, validation_report = _validation_source(other, data, reused)
        notes = shared_texts(digests, other.column("digests"))
    settled = "+".join(dict.fromkeys(data.rule(source["kind"]) for source in store.meta["sources"]))
    identity = {**_identity(data), "too_long": settled, "train": store.meta["key"]}
    if data.held_out:
        identity["validation"], identity["validation_tokens"] = data.validation, data.validation_tokens
    return PreparedText(data, train, validation, _report(store, train_report, validation_report, notes), identity)


def _validation_source(store: TokenStore, data: TextData, reused: dict[str, bool]) -> tuple[Rows, SetReport]:
    chosen, words = cap_validation(store, data)
    return rows_from_store(store, data, "validation", reused["validation"], chosen, words)


def _streaming(
    data: TextData,
    job: dict[str, Any],
    train: list[Source],
    store: TokenStore | None,
    reused: dict[str, bool],
    fingerprint: str,
    rules: dict[str, Any],
    vocabulary: int | None,
) -> PreparedText:
    validation, validation_report = None, None
    if store is not None:
        validation, validation_report = _validation_source(store, data, reused)
    files = [f for source in train for f in source.files]
    job = {**job, "formats": [source.format for source in train]}
    source_of = [i for i, source in enumerate(train) for _ in source.files]
    ends = [[f.kind, f.path if f.kind == "hub" else _glimpse(f.path)] for f in files]
    text = digest_of([ends, fingerprint, rules, job["formats"]])[:32]
    identity = {**_identity(data), "train": text, "window_rows": data.window_rows}

    def open_stream(rows_per_step: int, epochs: int | None) -> StreamedText:
        return StreamedText(data, job, files, source_of, rows_per_step, identity, epochs, vocabulary)

    probing = StreamedText(data, job, files, source_of, 1, {}, 1, vocabulary)
    with probing as first:  # the first document tells, now and not at step 1, that all is well
        facts = first.tokenizer_facts()
    data = replace(data, too_long=_one_rule(data, train, facts["kinds"]))
    identity |= _identity(data)
    names = ", ".join(data.sources("train"))
    note = f"train: {names}, streamed; rows shuffled within windows of {data.window_rows} rows"
    report = DataReport(None, validation_report, facts["size"], facts["end"], facts["begin"], [note])
    return PreparedText(data, None, validation, report, identity, open_stream)


def _one_rule(data: TextData, sources: Sequence[Source], kinds: Sequence[str]) -> TooLong:
    """The rule for long documents of all sources: a window of a stream has one.

    Raises:
        DataError: they would have several.
    """
    rules = {data.rule(kind): (source.name, kind) for source, kind in zip(sources, kinds, strict=True)}
    if len(rules) == 1:
        return next(iter(rules))
    raise DataError(
        "data.streaming with sources of several kinds in one stream",
        "; ".join(f"{name} is {kind}, whose rule for long documents is {rule}" for rule, (name, kind) in rules.items()),
        "documents of one window are laid into rows by one rule",
        ["data.too_long=truncate, for all of them", "data.streaming=false"],
    )


def _store_job(
    name: str, sources: Sequence[Source], cache: Path, fingerprint: str, rules: dict[str, Any]
) -> dict[str, Any]:
    records = source_records(sources, cache)
    key = content_key(records, fingerprint, rules)
    return {
        "set": name, "folder": str(cache / "tokens" / key), "key": key, "records": records,
        "sources": [s.as_dict() for s in sources], "tokenizer_fingerprint": fingerprint,
    }  # fmt: skip


def _identity(data: TextData) -> dict[str, Any]:
    return {"seq_len": data.seq_len, "packing": data.packing, "too_long": data.too_long, "seed": data.seed}


def _report(store: TokenStore, train: Any, validation: Any, notes: list[str]) -> DataReport:
    facts = store.meta["tokenizer"]
    return DataReport(train, validation, facts["size"], facts["end"], facts["begin"], notes)


def _stored(name: str, data: TextData) -> bool:
    return name == "validation" or not data.streaming


def _is_ready(tokenizer: str | Path) -> bool:
    """Whether the child can read it directly, with nothing to convert and keep."""
    path = Path(tokenizer)
    return path.suffix == ".json" or (path / "tokenizer.json").is_file()


def _glimpse(path: str) -> str:
    """Size and hash of the first and last 64 KiB: streaming is for text too large to read beforehand."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        return f"{size}:{hashlib.sha256(head + file.read()).hexdigest()}"


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
