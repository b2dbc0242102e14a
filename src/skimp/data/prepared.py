"""Text that is ready: the row tables of training and validation, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from skimp.core.batch import Batch
from skimp.core.errors import DataError
from skimp.data.mixture import MixedStream
from skimp.data.packing import PackingCounts, join_counts, join_tables, lay_rows, nothing_left
from skimp.data.report import DataReport, SetReport, rule_in_words
from skimp.data.rows import Rows
from skimp.data.split import first_by_hash, hold_out
from skimp.data.store import TokenStore
from skimp.data.stream import TokenStream, rows_of
from skimp.data.streaming import StreamedText
from skimp.data.textdata import TextData

Stream = TokenStream | StreamedText | MixedStream


class PreparedText:
    """What `prepare` returns.

    Attributes:
        data: the description it was made from.
        train: rows of one epoch; None when streaming, and of a mixture.
        validations: rows of each validation set, by name.
        report: counts of everything, and what was left out.
        tokenizer_size: largest token id + 1.
        rows_per_epoch: rows that count as one epoch (of a repeating mixture: as many as its sources have together);
            None when streaming: not known before the first epoch is over.
        rows_in_all: rows there are and no more, of a mixture that stops; else None.
        shares: of a stored mixture (name, share, rows) of each source.
        open_stream: (rows a step, epochs) -> the stream, where it is not a plain one over `train`.
    """

    def __init__(
        self,
        data: TextData,
        train: Rows | None,
        validations: dict[str, Rows],
        report: DataReport,
        identity: dict[str, Any],
        rows_per_epoch: int | None = None,
    ) -> None:
        self.data = data
        self.train = train
        self.validations = validations
        self.report = report
        self.tokenizer_size = report.tokenizer_size
        self.identity = identity
        self.rows_per_epoch = rows_per_epoch if train is None else len(train)
        self.rows_in_all: int | None = None
        self.shares: list[tuple[str, float, int]] = []
        self.open_stream: Callable[[int, int | None], Stream] | None = None

    @property
    def validation(self) -> Rows | None:
        """The first validation set, or None."""
        return next(iter(self.validations.values()), None)

    @property
    def tokens_per_epoch(self) -> int | None:
        """Trained tokens of one pass over the training text; None when streaming."""
        return sum(r.packing.trained_tokens for r in self.report.trains) if self.report.trains else None

    def stream(self, batch_tokens: int, epochs: int | None = None) -> Stream:
        """Batches of `batch_tokens / seq_len` rows, a whole optimizer step each.

        Raises:
            RecipeError: `batch_tokens` is not a multiple of seq_len.
        """
        rows = rows_of(batch_tokens, self.data.seq_len)
        if self.train is not None:
            return TokenStream(self.train, rows, self.data.seed, self.identity, epochs)
        if self.open_stream is None:
            raise DataError("a stream of training text", "this text was prepared without any")
        return self.open_stream(rows, epochs)

    def validation_batches(
        self, max_tokens: int | None = None, rows: int = 1, name: str | None = None
    ) -> Iterator[Batch]:
        """Batches of at most `rows` rows in file order, the same every time; `max_tokens` positions at most,
        but one row at least. `name` is the set; None is the first. Nothing when there is no validation set."""
        chosen = self.validation if name is None else self.validations[name]
        if chosen is None:
            return iter(())
        limit = None if max_tokens is None else max(1, max_tokens // self.data.seq_len)
        return chosen.in_order(rows, limit)


def rows_from_store(
    store: TokenStore,
    data: TextData,
    name: str,
    reused: bool,
    chosen: np.ndarray | None = None,
    held_out: str = "",
    trains: bool = True,
) -> tuple[Rows, SetReport]:
    """The rows of the documents `chosen` (bool mask; None: all) for training or (not `trains`) evaluation, and their
    report."""
    offsets = store.column("documents")
    documents = np.arange(store.documents) if chosen is None else np.flatnonzero(chosen)
    sources = store.source_of(documents)
    rules = [data.rule(s["kind"]) for s in store.meta["sources"]]
    parts = []
    for rule in dict.fromkeys(rules):  # sources with one rule share rows
        of_rule = documents[np.isin(sources, [i for i, r in enumerate(rules) if r == rule])]

        def place(document: int, of: np.ndarray = of_rule) -> str:
            return store.place(int(of[document]))

        part = lay_rows(
            offsets[of_rule], (offsets[1:] - offsets[:-1])[of_rule], data.seq_len, data.packing, rule,
            sources=store.source_of(of_rule), place=place,
            trained_before=store.trained_before if store.masked else None, may_be_empty=True,
        )  # fmt: skip
        parts.append(part)
    table, counts = join_tables([t for t, _ in parts]), join_counts([c for _, c in parts])
    if not table.rows:
        raise nothing_left(counts, data.seq_len, int(np.diff(offsets)[documents].max(initial=0)), name, trains)
    rows = Rows(table, store.read, int(store.meta["tokenizer"]["end"]), store.trained)
    return rows, _report(store, data, name, reused, counts, held_out)


def split_store(store: TokenStore, data: TextData) -> tuple[np.ndarray, str, str]:
    """Hold documents out: (mask of validation documents, in words for train, in words for validation)."""
    fraction = data.validation if isinstance(data.validation, float) else None
    mask = hold_out(np.diff(store.column("documents")), data.seed, fraction, data.validation_tokens)
    taken = f"{int(mask.sum())} of {store.documents} documents held out by hash of (seed {data.seed}, document)"
    return mask, f"after {taken}", taken


def cap_validation(store: TokenStore, data: TextData) -> tuple[np.ndarray | None, str]:
    """The documents of a validation source that `validation_tokens` leaves: (bool mask or None for all, in
    words).
    """
    if data.validation_tokens is None:
        return None, ""
    mask = np.zeros(store.documents, bool)
    mask[first_by_hash(np.diff(store.column("documents")), data.seed, None, data.validation_tokens)] = True
    if mask.all():
        return None, ""
    words = f"{int(mask.sum())} of {store.documents} documents taken by hash of (seed {data.seed}, document)"
    return mask, f"{words}: at most {data.validation_tokens} tokens asked for"


def shared_texts(train: np.ndarray, validation: np.ndarray, name: str = "validation") -> list[str]:
    """A note when documents of a validation set are in the training text too, word for word."""
    number = int(np.isin(validation, train).sum())
    if not number:
        return []
    of = "" if name == "validation" else f" of {name}"
    return [f"note: {number} of {len(validation)} validation documents{of} are also training documents, word for word"]


def _report(
    store: TokenStore, data: TextData, name: str, reused: bool, counts: PackingCounts, held_out: str
) -> SetReport:
    meta = store.meta
    return SetReport(
        name=name,
        sources=[s["name"] for s in meta["sources"]],
        files=sum(len(s["files"]) for s in meta["sources"]),
        ignored_files=sum(s["ignored"] for s in meta["sources"]),
        rows_read=meta["counts"]["rows"],
        dropped=meta["counts"]["dropped"],
        unknown_tokens=meta["counts"]["unknown_tokens"],
        rule="; ".join(
            rule_in_words(data.packing, rule, data.seq_len)
            for rule in dict.fromkeys(data.rule(s["kind"]) for s in meta["sources"])
        ),
        packing=counts,
        held_out=held_out,
        reused=reused,
        folder=str(store.folder),
        by_source=[
            _source_counts(source, counts.by_source[i] if i < len(counts.by_source) else {})
            for i, source in enumerate(meta["sources"])
        ],
        trained=TRAINED[data.train_on] if store.masked or data.train_on == "all" else "",
    )


#: What is trained, for people.
TRAINED = {
    "answers": "trained on completions and assistant turns",
    "last": "trained on the last answer of each row",
    "all": "trained on every token, prompts too",
}


def _source_counts(source: dict[str, Any], packed: dict[str, int]) -> dict[str, Any]:
    names = ("documents_in", "tokens_in", "documents", "tokens", "rows", "trained_tokens",
             "truncated_documents", "truncated_tokens", "dropped_documents", "dropped_tokens",
             "untrained_documents", "untrained_tokens")  # fmt: skip
    return {
        "source": source["name"],
        "format": source["kind"],
        "fields": source["fields"],
        "rows_read": source["counts"]["rows"],
        "dropped": {why: n for why, n in source["counts"]["dropped"].items() if n},
        **{name: packed.get(name, 0) for name in names},
    }
