"""From token stores and files to a `PreparedText`: rows of each set, their reports, and the stream of training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from skimp.core.errors import DataError
from skimp.data.fingerprint import digest_of, glimpse
from skimp.data.mixture import MixedStream, rows_until_out
from skimp.data.prepared import PreparedText, Stream, cap_validation, rows_from_store, shared_texts, split_store
from skimp.data.report import DataReport, SetReport
from skimp.data.rows import Rows
from skimp.data.sources import Source
from skimp.data.store import TokenStore
from skimp.data.stream import TokenStream
from skimp.data.streaming import StreamedText
from skimp.data.textdata import TextData, TooLong

#: Tokens held out of a stream where no number is given: sixteen evaluations' worth of the default 4,096.
STREAM_HELD = 1 << 16


def name_of_held(part: str) -> str:
    """The validation set held out of a part of the training text."""
    return "validation" if part == "train" else part


def held_rule(data: TextData) -> dict[str, Any]:
    """Which documents of a stream are held out: by a hash of each one's own place, since there is no end to count
    from; so many of them, from the beginning, are the validation set."""
    return {"fraction": data.validation, "seed": data.seed, "tokens": data.validation_tokens or STREAM_HELD}


def stored_text(
    data: TextData, names: Sequence[str], stores: dict[str, TokenStore], reused: dict[str, bool]
) -> PreparedText:
    """Rows of stored training text, one part or the parts of a mixture, and of the validation sets."""
    trains, reports, validations, held, notes, digests = [], [], {}, [], [], []
    for name in names:
        key = f"train {name}"
        store = stores[key]
        mask, words, held_words = split_store(store, data) if data.held_out else (None, "", "")
        chosen = None if mask is None else ~mask
        rows, report = rows_from_store(store, data, name, reused[key], chosen, words)
        trains.append(rows)
        reports.append(report)
        texts = store.column("digests")
        digests.append(texts if chosen is None else texts[chosen])
        if mask is not None:
            set_name = name_of_held(name)
            validations[set_name], found = rows_from_store(
                store, data, set_name, reused[key], mask, held_words, trains=False
            )
            held.append(found)
            notes += shared_texts(digests[-1], texts[mask], set_name)
    for name in data.validation_sets:
        validations[name], found = _validation(stores[name], data, name, reused[name])
        held.append(found)
        chosen = cap_validation(stores[name], data)[0]
        own = stores[name].column("digests")
        notes += shared_texts(np.concatenate(digests), own if chosen is None else own[chosen], name)
    first = stores[f"train {names[0]}"].meta
    facts = first["tokenizer"]
    whole = DataReport(reports, held, facts["size"], facts["end"], facts["begin"], notes)
    keys = [stores[f"train {name}"].meta["key"] for name in names]
    identity = {**_identity(data), "too_long": _settled(data, stores, names), "train": keys[0]}
    if data.held_out:
        identity["validation"], identity["validation_tokens"] = data.validation, data.validation_tokens
    if data.weights is None:
        return PreparedText(data, trains[0], validations, whole, identity)
    return _mixed(data, names, trains, validations, whole, {**identity, "train": keys})


def _settled(data: TextData, stores: dict[str, TokenStore], names: Sequence[str]) -> str:
    kinds = [source["kind"] for name in names for source in stores[f"train {name}"].meta["sources"]]
    return "+".join(dict.fromkeys(data.rule(kind) for kind in kinds))


def _mixed(
    data: TextData,
    names: Sequence[str],
    trains: Sequence[Rows],
    validations: dict[str, Rows],
    report: DataReport,
    identity: dict[str, Any],
) -> PreparedText:
    weights = data.weights or []
    lengths = [len(rows) for rows in trains]
    stops = data.when_out == "stop"
    rows_per_epoch = rows_until_out(lengths, weights) if stops else sum(lengths)
    if not rows_per_epoch:
        shortest = min(range(len(lengths)), key=lambda i: lengths[i] / weights[i])
        raise DataError(
            f"data.train: a mixture that stops when a source runs out, {weights[shortest]:.1%} of it {names[shortest]}",
            f"{lengths[shortest]} rows of {names[shortest]}",
            "it would run out with the first row",
            ["data.when_out=repeat", "give more of it, or a smaller weight"],
        )
    identity |= {"weights": weights, "when_out": data.when_out}
    text = PreparedText(data, None, validations, report, identity, rows_per_epoch=rows_per_epoch)
    text.rows_in_all = rows_per_epoch if stops else None
    text.shares = [(n, w, r) for n, w, r in zip(names, weights, lengths, strict=True)]

    def open_stream(rows_per_step: int, epochs: int | None) -> MixedStream:
        once = 1 if stops else None
        streams = [TokenStream(rows, 1, data.seed, {}, once) for rows in trains]
        return MixedStream(streams, names, weights, rows_per_step, identity, rows_per_epoch)

    text.open_stream = open_stream
    return text


def _validation(store: TokenStore, data: TextData, name: str, reused: bool) -> tuple[Rows, SetReport]:
    chosen, words = cap_validation(store, data)
    return rows_from_store(store, data, name, reused, chosen, words, trains=False)


def streamed_text(
    data: TextData,
    names: Sequence[str],
    parts: Sequence[list[Source]],
    stores: dict[str, TokenStore],
    reused: dict[str, bool],
    job: dict[str, Any],
    rules: list[Any],
    vocabulary: int | None,
) -> PreparedText:
    """Training text read as it goes, one stream or one a part of a mixture; validation sets are stored."""
    validations, held = {}, []
    for name, store in stores.items():
        validations[name], found = _validation(store, data, name, reused[name])
        if data.held_out:
            found = replace(found, held_out=f"{data.validation:.1%} held out by hash of (seed {data.seed}, file, row)")
        held.append(found)
    hold = held_rule(data) if data.held_out else None
    opened = [_Opened(data, part, {**job, "hold": hold}, [*rules, hold], vocabulary) for part in parts]
    facts = opened[0].facts
    notes = [
        f"{name}: {', '.join(s.name for s in part)}, streamed; rows shuffled within windows of {data.window_rows} rows"
        + (f"; rows of format {', '.join(o.facts['kinds'])}" if set(o.facts["kinds"]) != {"text"} else "")
        for name, part, o in zip(names, parts, opened, strict=True)
    ]
    report = DataReport([], held, facts["size"], facts["end"], facts["begin"], notes)
    weights = data.weights
    if weights is None:
        text = PreparedText(opened[0].data, None, validations, report, opened[0].identity)
        text.open_stream = lambda rows_per_step, epochs: opened[0].stream(rows_per_step, epochs)
        return text
    if data.when_out == "stop":
        raise DataError(
            "data.when_out=stop of a streamed mixture",
            "how many rows a source has is not known before it was read",
            "the learning-rate schedule needs the number of steps from the first one on",
            ["data.when_out=repeat", "data.streaming=false"],
        )
    identity = {**opened[0].identity, "train": [o.identity["train"] for o in opened],
                "too_long": "+".join(dict.fromkeys(o.data.too_long for o in opened)),
                "weights": weights, "when_out": data.when_out}  # fmt: skip
    text = PreparedText(data, None, validations, report, identity)

    def open_mixture(rows_per_step: int, epochs: int | None) -> Stream:
        return MixedStream([o.stream(1, None) for o in opened], names, weights, rows_per_step, identity)

    text.open_stream = open_mixture
    return text


class _Opened:
    """Sources that are read in one stream, tried once: the first document tells, now and not at step 1, that all is
    well."""

    def __init__(
        self, data: TextData, sources: Sequence[Source], job: dict[str, Any], rules: list[Any], vocabulary: int | None
    ) -> None:
        self.files = [f for source in sources for f in source.files]
        self.source_of = [i for i, source in enumerate(sources) for _ in source.files]
        self.job = {**job, "formats": [source.format for source in sources]}
        self.vocabulary = vocabulary
        self.data = data
        self.identity: dict[str, Any] = {}
        with self.stream(1, 1) as first:
            self.facts = first.tokenizer_facts()
        self.data = replace(data, too_long=_one_rule(data, sources, self.facts["kinds"]))
        if set(self.facts["kinds"]) != {"text"}:  # the first row tells that an answer is left to train on
            with self.stream(1, 1) as first:
                first.next_step()
        ends = [[f.kind, f.path if f.kind == "hub" else glimpse(f.path)] for f in self.files]
        text = digest_of([ends, *rules, self.job["formats"]])[:32]
        self.identity = {**_identity(self.data), "train": text, "window_rows": data.window_rows}

    def stream(self, rows_per_step: int, epochs: int | None) -> StreamedText:
        return StreamedText(
            self.data, self.job, self.files, self.source_of, rows_per_step, self.identity, epochs, self.vocabulary
        )


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
        ["data.too_long=truncate, for all of them", "a weight for each source", "data.streaming=false"],
    )


def _identity(data: TextData) -> dict[str, Any]:
    return {"seq_len": data.seq_len, "packing": data.packing, "too_long": data.too_long, "seed": data.seed}
