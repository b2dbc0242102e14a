"""json, csv, tsv and parquet rows, plain and packed: the same rows from each, and bad files named by row."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from data_texts import document

from skimp.core.errors import DataError
from skimp.data import TextData, TokenStore, prepare, readers, tables
from skimp.data.readers import Entry, read_records
from skimp.data.sources import SourceFile

PAIRS = [{"prompt": f"say {i}:", "completion": document(i, 3 + i % 5) + '\n"x", é\t;' * (i % 3)} for i in range(17)]


def written(folder: Path, suffix: str, rows: list[dict]) -> Path:
    """The rows in a file of that kind, packed as its name says."""
    path = folder / f"rows{suffix}"
    kind = suffix.split(".")[1]
    if kind == "jsonl":
        data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
    elif kind == "json":
        data = json.dumps(rows, indent=1).encode()
    elif kind in ("csv", "tsv"):
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        data = out.getvalue().encode()
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        data = sink.getvalue()
    if suffix.endswith(".gz"):
        data = gzip.compress(data)
    if suffix.endswith(".zst"):
        import pyarrow as pa

        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows_from_anywhere(tmp_path: Path, kind: str, packed: str) -> None:
    file = SourceFile.of(str(written(tmp_path, kind + packed, PAIRS)))
    records = list(read_records(file, "utf-8"))
    assert [r.fields for r in records] == PAIRS
    assert [r.row for r in records] == list(range(1, 18))
    for start in (0, 1, 9, 16):
        entry = Entry(records[start].row, records[start].offset)
        assert [r.fields for r in read_records(file, "utf-8", entry)] == PAIRS[start:]


def test_structs_of_a_parquet_file_have_the_keys_they_were_written_with(tmp_path: Path) -> None:
    """A column of structs gives every one the keys of all; a template would print them."""
    rows = [{"messages": [{"role": "assistant", "calls": [{"arguments": {key: 1}}]}], "n": None} for key in "ab"]
    file = SourceFile.of(str(written(tmp_path, ".parquet", [*rows, {"messages": None, "n": 3}])))
    assert [r.fields for r in read_records(file, "utf-8")] == [*rows, {"messages": None, "n": 3}]


def test_a_folder_of_mixed_files_is_one_source(tmp_path: Path, tokenizer_folder: Path) -> None:
    for number, suffix in enumerate((".csv", ".json.gz", ".jsonl.zst", ".tsv", ".parquet")):
        path = written(tmp_path, suffix, PAIRS[number * 3 : number * 3 + 3])
        path.rename(tmp_path / f"{number}{suffix}")
    report = prepare(TextData(str(tmp_path), seq_len=128), tokenizer_folder).report.train
    assert report.packing.documents_in == 15
    assert [s["format"] for s in report.by_source] == ["prompt"]
    (tmp_path / "5.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(
        DataError, match=r"5.jsonl: rows of the same kind as the files before it, prompt(.|\n)*sources of their own"
    ):
        prepare(TextData(str(tmp_path), seq_len=128), tokenizer_folder)


def test_text_cells_and_named_fields(tmp_path: Path, tokenizer_folder: Path, encode: Callable) -> None:
    path = written(tmp_path, ".csv", [{"body": "the cat", "n": 1}, {"body": "", "n": 2}, {"body": "a\nmat", "n": 3}])
    with pytest.raises(DataError, match=r"fields there: body, n(.|\n)*data.field=body"):
        prepare(TextData(str(path), seq_len=16), tokenizer_folder)
    prepared = prepare(TextData(str(path), seq_len=16, field="body"), tokenizer_folder)
    store = TokenStore(Path(prepared.report.train.folder))
    offsets = store.column("documents")
    found = [store.read(int(a), int(b - a)).tolist() for a, b in itertools.pairwise(offsets)]
    assert found == [encode("the cat"), encode("a\nmat")]
    assert prepared.report.train.dropped == {"empty": 1}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "prompt,completion\na,b\nc\n", ["row 2 (line 3)", "2 cells", "1 cells"]),
        ("a.csv", "prompt,completion\na,b,c\n", ["row 1 (line 2)", "3 cells, beginning 'a, b, c'"]),
        ("a.csv", 'prompt,completion\n"a\nx",b\nc,"d\n', ["row 2 (line 4)", "not closed"]),
        ("a.csv", 'prompt,completion\na,"b"c\n', ["row 1 (line 2)", "double those inside"]),
        ("a.csv", "prompt;completion\na;b\n", ["prompt;completion"]),
        ("a.csv", "prompt;completion\na,c;b\n", ["separated by ';'"]),
        ("a.csv", "prompt,prompt\na,b\n", ["'prompt' twice"]),
        ("a.tsv", "prompt\tcompletion\na\n", ["row 1 (line 2)", "1 cells"]),
        ("a.csv", "prompt,completion\n", ["0 rows"]),
        ("a.json", '[{"prompt": "a", "completion": "b"}', ["row 2", "no end"]),
        ("a.json", '[{"prompt": "a", "completion": "b"},]', ["row 2", "a comma"]),
        ("a.json", '[{"prompt": "a", "completion": "b"}] x', ["after the end"]),
        ("a.json", '[{"prompt": "a", "completion": "b"}, {"prompt": ', ["row 2", "begins '{\"prompt\": '"]),
        ("a.json", '[{"prompt": "a", "completion": "b"}, 7]', ["row 2", "a JSON int"]),
        ("a.json", '{"prompt": "a"}', ["fields there: prompt", "data.fields.completion"]),
        ("a.jsonl", '{"prompt": "a", "completion": null}', ["row 1", "the field 'completion'", "null"]),
        ("a.csv.gz", "prompt,completion\na,b\n", ["a.csv.gz", "not of the kind"]),
    ],
)
def test_bad_files_are_named_by_row(
    tmp_path: Path, tokenizer_folder: Path, name: str, text: str, words: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as raised:
        prepare(TextData(str(tmp_path / name), seq_len=16), tokenizer_folder)
    for word in [str(tmp_path / name), *words]:
        assert word in str(raised.value)


def test_bytes_that_are_not_of_the_encoding(tmp_path: Path, tokenizer_folder: Path) -> None:
    for name, text in (("a.csv", b"text\ncaf\xe9\n"), ("a.json", b'[{"text": "caf\xe9"}]')):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(DataError, match=r"byte 0xe9(.|\n)*data.encoding=latin-1"):
            prepare(TextData(str(tmp_path / name), seq_len=16), tokenizer_folder)
        assert prepare(TextData(str(tmp_path / name), seq_len=16, encoding="latin-1"), tokenizer_folder).train


def test_json_is_read_an_object_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects in a row without commas too; blocks so small that every object and character is cut by them."""
    monkeypatch.setattr(tables, "BLOCK", 3)
    rows = [{"text": "é" * n, "more": {"deep": [1, {"x": None}]}} for n in range(7)]
    for text in (json.dumps(rows, ensure_ascii=False), "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)):
        (tmp_path / "a.json").write_text("\ufeff" + text, encoding="utf-8")
        file = SourceFile.of(str(tmp_path / "a.json"))
        assert [r.fields for r in read_records(file, "utf-8")] == rows
    assert [r.row for r in read_records(file, "utf-8", Entry(5))] == [5, 6, 7]


def test_a_large_json_list_is_not_held(tmp_path: Path) -> None:
    """Traced bytes stay at a few blocks, whatever the file's size."""
    import tracemalloc

    path = tmp_path / "a.json"
    path.write_text("[" + ",".join(json.dumps({"text": "x" * 1000}) for _ in range(22_000)) + "]")
    assert path.stat().st_size > 20 * readers.BLOCK
    tracemalloc.start()
    assert sum(1 for _ in read_records(SourceFile.of(str(path)), "utf-8")) == 22_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * readers.BLOCK
