"""What became of every row that was read: how much is trained, what was left out and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from skimp.data.packing import PackingCounts


@dataclass(frozen=True)
class SetReport:
    """One set, training or validation, for one epoch.

    Attributes:
        name: train or validation.
        sources: what the user named.
        files: files read, and `ignored_files` lying among them that are of no kind that is read.
        rows_read: rows of those files, or of the part of them that fell to this set when it was split off.
        dropped: rows left out before packing, by reason.
        unknown_tokens: tokens the tokenizer had no word for, over all rows read.
        held_out: "" or how this set was chosen from the training sources.
        rule: how documents became rows, in words.
        packing: the counts of that.
        by_source: for each source its name, format, the fields of its first row, and the same counts.
        trained: what of a row is trained, in words; "" for text.
        reused: True when the tokens were found in the cache.
        folder: where they lie.
    """

    name: str
    sources: list[str]
    files: int
    ignored_files: int
    rows_read: int
    dropped: dict[str, int]
    unknown_tokens: int
    rule: str
    packing: PackingCounts
    held_out: str = ""
    reused: bool = False
    folder: str = ""
    by_source: list[dict[str, Any]] = field(default_factory=list)
    trained: str = ""

    def lines(self) -> list[str]:
        """For a person, one fact each."""
        p = self.packing
        dropped = sum(self.dropped.values())
        out = [
            f"{self.name}: " + (f"{', '.join(self.sources)} " if self.sources != [self.name] else "")
            + f"({self.files} file{'s' * (self.files != 1)}"
            + (f", {self.ignored_files} others ignored" if self.ignored_files else "")
            + (", tokens from the cache" if self.reused else "") + ")",
            f"  {p.documents_in:,} documents, {p.tokens_in:,} tokens"
            + (f", {self.held_out}" if self.held_out else ""),
            f"  {p.rows:,} rows, {p.trained_tokens:,} trained tokens an epoch; {self.rule}",
        ]  # fmt: skip
        out[1:1] = self._formats()
        for number, words in (
            (dropped, "rows dropped: " + ", ".join(f"{n} {why}" for why, n in self.dropped.items() if n)),
            (p.split_documents, f"documents cut at row ends, into {p.pieces:,} pieces in all"),
            (p.truncated_documents, f"documents truncated, {p.truncated_tokens:,} tokens lost"),
            (p.dropped_documents, f"documents dropped as longer than a row, {p.dropped_tokens:,} tokens"),
            (
                p.untrained_documents,
                f"rows dropped, {p.untrained_tokens:,} tokens: the prompt fills the row and leaves no trained token",
            ),
            (p.tail_tokens, "tokens dropped: rows and pieces with nothing to predict"),
            (
                p.padding_tokens,
                f"positions of padding ({p.padding_tokens / (p.tokens + p.padding_tokens):.1%})",
            ),
            (self.unknown_tokens, "unknown tokens: the tokenizer has no word for them"),
        ):
            if number:
                out.append(f"  {number:,} {words}")
        if len(self.by_source) > 1:
            out += [_source_line(source) for source in self.by_source]
        return out

    def _formats(self) -> list[str]:
        """What the rows were taken for, said when they are more than text."""
        out = []
        for source in self.by_source:
            if source["format"] != "text":
                others = ", ".join(source["fields"])
                of = f"{source['source']}: " if len(self.by_source) > 1 else ""
                out.append(f"  {of}rows of format {source['format']} (fields {others}); {self.trained}")
        return out


@dataclass(frozen=True)
class DataReport:
    """Everything the data room did: a report for each part of the training text (several in a mixture; none when
    streaming, whose counts come with the stream) and each validation set."""

    trains: list[SetReport]
    validations: list[SetReport]
    tokenizer_size: int
    end_token: int
    begin_token: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def train(self) -> SetReport | None:
        """The training text, or the first source of a mixture."""
        return self.trains[0] if self.trains else None

    @property
    def validation(self) -> SetReport | None:
        """The first validation set."""
        return self.validations[0] if self.validations else None

    def lines(self) -> list[str]:
        return [line for part in (*self.trains, *self.validations) for line in part.lines()] + self.notes

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `by_source` of a set holds what its packing counts have by source."""
        record: dict[str, Any] = asdict(self)
        for part in (*record["trains"], *record["validations"]):
            del part["packing"]["by_source"]
        return record


def _source_line(source: dict[str, Any]) -> str:
    lost = {
        **source["dropped"],
        "truncated": source["truncated_documents"],
        "longer than a row": source["dropped_documents"],
        "without a trained token within a row": source["untrained_documents"],
    }
    return (
        f"  {source['source']}: {source['rows_read']:,} rows read, {source['tokens_in']:,} tokens, "
        f"{source['rows']:,} rows, {source['trained_tokens']:,} trained tokens an epoch"
        + "".join(f"; {n:,} {why}" for why, n in lost.items() if n)
    )


def rule_in_words(packing: bool, too_long: str, seq_len: int) -> str:
    """How documents become rows."""
    long = {
        "split": f"cut every {seq_len} tokens",
        "truncate": f"truncated to {seq_len} tokens",
        "drop": "dropped",
        "error": "refused",
    }[too_long]
    if packing and too_long == "split":
        return f"packed end to end, cut at row ends every {seq_len} tokens, no attention across documents"
    if packing:
        return f"packed whole (best fit), no attention across documents; documents over {seq_len} tokens {long}"
    return f"one document a row, padded to {seq_len}; longer ones {long}"
