"""What the rows of each source are, told by the first of them; preference pairs are checked and refused here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skimp.core.errors import DataError
from skimp.data.kinds import Rules, is_plain, kind_of
from skimp.data.pairs import check_pairs, not_yet
from skimp.data.readers import Record, read_records
from skimp.data.sources import SourceFile


class Look:
    """The kind of each file and source, found once.

    Args:
        rules: how rows are read.
        encoding: of the files.
        source_of: the source of each file; None: all are of source 0.
        asked: the format asked for each source; None, or "": that of the rules.

    Attributes:
        kinds: what each source turned out to be.
        names: the fields of its first row.
    """

    def __init__(
        self, rules: Rules, encoding: str, source_of: Sequence[int] | None = None, asked: Sequence[str] | None = None
    ) -> None:
        self.rules = rules
        self.encoding = encoding
        self.source_of = source_of
        self.asked = asked
        self.kinds: dict[int, str] = {}
        self.names: dict[int, list[str]] = {}
        self._seen: dict[int, str] = {}  # the kind of each file that was looked at

    def source(self, file: int) -> int:
        return 0 if self.source_of is None else self.source_of[file]

    def kinds_of(self, files: Sequence[SourceFile]) -> list[str]:
        """The kind of each source, by the first row of its first file that has one.

        Raises:
            DataError: a kind cannot be told, or a file is broken.
        """
        for index, file in enumerate(files):
            if self.source(index) not in self.kinds and self.kind(index, file) == "preference":
                self._check_pairs(files, self.source(index))
        return [self.kinds.get(s, "text") for s in sorted({self.source(i) for i in range(len(files))})]

    def _check_pairs(self, files: Sequence[SourceFile], source: int) -> None:
        """Read a whole source of preference pairs, and say that they are sound but not trained on yet."""
        of_source = [(i, f) for i, f in enumerate(files) if self.source(i) == source]
        names = self.rules.fields
        wanted = (names.prompt, names.chosen, names.rejected)

        def rows() -> Iterator[tuple[Record, str]]:
            for index, file in of_source:
                if self.kind(index, file) is not None:
                    for record in read_records(
                        file, self.encoding, columns=lambda there: [n for n in there if n in wanted]
                    ):
                        yield record, f"{file.path}, row {record.row}"

        counts = check_pairs(rows(), names, self.rules.bad_rows == "drop")
        raise not_yet(", ".join(f.path for _, f in of_source[:3]), counts, names)

    def kind(self, index: int, file: SourceFile) -> str | None:
        """The kind of a file's rows, which must be that of its source; None when it has no row."""
        if index in self._seen:
            return self._seen[index]
        source = self.source(index)
        asked = self.rules.format if self.asked is None else self.asked[source] or self.rules.format
        known = self.kinds.get(source)
        if is_plain(file):
            if asked not in ("auto", "text"):
                raise DataError(
                    f"{file.path}: rows of data.format={asked}",
                    "a file of plain text",
                    "it has no fields",
                    ["data.format=auto, or text", "a jsonl, json, parquet, csv or tsv file"],
                )
            kind = "text"
        elif known is not None and asked != "auto":
            kind = known
        else:
            first = next(iter(read_records(file, self.encoding)), None)
            if first is None:
                return None
            kind = kind_of(asked, list(first.fields), self.rules.fields, f"{file.path}, row {first.row}")
            self.names.setdefault(source, list(first.fields))
        if known is not None and kind != known:
            raise DataError(
                f"{file.path}: rows of the same kind as the files before it, {known}",
                f"{kind}",
                "a source has one kind of row",
                ["name the files as sources of their own", f"data.format={known}"],
            )
        self.kinds[source] = self._seen[index] = kind
        return kind
