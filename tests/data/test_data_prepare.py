"""From files to tokens: the child process, the cache, and what is said when the text is bad."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_texts import document

from skimp.core.errors import DataError, ModelError, RecipeError
from skimp.data import TextData, TokenStore, prepare, tokenise
from skimp.data import child as child_module
from skimp.data.child import run_to_end
from skimp.data.sources import find_sources
from skimp.data.store import StoreWriter
from skimp.data.tokenizer import load_tokenizer


def documents_of(prepared: object) -> list[list[int]]:
    store = TokenStore(Path(prepared.report.train.folder))
    offsets = store.column("documents")
    return [store.read(int(a), int(b - a)).tolist() for a, b in itertools.pairwise(offsets)]


TEXTS = [document(i, 3 + i % 9) for i in range(23)] + ["naïve café – 한국어 🙂"]


def test_jsonl_gz_zst_parquet_and_txt_give_the_same_tokens(
    tmp_path: Path, tokenizer_folder: Path, encode: Callable, write_jsonl: Callable
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = write_jsonl(TEXTS)
    packed = gzip.compress(plain.read_bytes())
    (tmp_path / "z.jsonl.gz").write_bytes(packed)
    with pa.output_stream(str(tmp_path / "z.jsonl.zst"), compression="zstd") as out:
        out.write(plain.read_bytes())
    pq.write_table(pa.table({"other": list(range(len(TEXTS))), "text": TEXTS}), tmp_path / "z.parquet")
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    (folder / "notes.md").write_text("not read")
    expected = [encode(t) for t in TEXTS]
    for source in (plain, tmp_path / "z.jsonl.gz", tmp_path / "z.jsonl.zst", tmp_path / "z.parquet", folder,
                   tmp_path / "texts" / "*.txt"):  # fmt: skip
        prepared = prepare(TextData(str(source), seq_len=16), tokenizer_folder)
        assert documents_of(prepared) == expected, source
        assert prepared.report.train.packing.tokens_in == sum(map(len, expected))
    assert prepare(TextData(str(folder), seq_len=16), tokenizer_folder).report.train.ignored_files == 1


def test_b15_one_trained_end_token_per_document_with_pad_equal_end(
    tokenizer_folder: Path, encode: Callable, write_jsonl: Callable
) -> None:
    end = encode("")[0]
    texts = ["the cat", "a mat<end>", "two dogs run far"]  # the second has its end token already
    for packing in (True, False):
        data = TextData(str(write_jsonl(texts)), seq_len=64, packing=packing)
        batch = prepare(data, tokenizer_folder).stream(64 if packing else 192).next_step()
        assert int((batch.labels == end).sum()) == 3


def test_counts_and_report(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = write_jsonl(["the cat", "", "  \n ", "a mat and a mat"])
    with open(path, "a") as file:
        file.write("\n\n" + json.dumps({"text": "far"}))  # blank lines, and no line end at the end
    report = prepare(TextData(str(path), seq_len=8, packing=False), tokenizer_folder).report
    assert report.train.rows_read == 5
    assert report.train.dropped == {"empty": 2}
    assert report.train.packing.documents_in == 3
    text = "\n".join(report.lines())
    assert "2 rows dropped: 2 empty" in text
    assert "positions of padding" in text
    json.dumps(report.as_dict())


def test_cache_is_used_and_follows_content(tokenizer_folder: Path, write_jsonl: Callable, own_cache: Path) -> None:
    path = write_jsonl(TEXTS)
    data = TextData(str(path), seq_len=16)
    first = prepare(data, tokenizer_folder).report.train
    assert not first.reused
    os.utime(path, (1, 1))  # another date, the same text
    moved = path.with_name("moved.jsonl")
    path.rename(moved)
    again = prepare(TextData(str(moved), seq_len=32), tokenizer_folder).report.train
    assert again.reused
    assert again.folder == first.folder
    write_jsonl([*TEXTS, "one more"])
    assert not prepare(data, tokenizer_folder).report.train.reused
    # damage is seen and the store made again
    tokens = Path(first.folder) / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert not prepare(TextData(str(moved), seq_len=32), tokenizer_folder).report.train.reused
    assert not list((own_cache / "tokens").glob("*.aside-*"))


def test_same_size_and_date_but_other_text_right_after_writing(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    """A change within the same tick of the clock must not be hidden by the remembered hash."""
    path = write_jsonl(["the cat sat"])
    status = path.stat()
    one = documents_of(prepare(TextData(str(path), seq_len=4), tokenizer_folder))
    write_jsonl(["the mat sat"])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert documents_of(prepare(TextData(str(path), seq_len=4), tokenizer_folder)) != one


def test_pydoc_is_sorted_and_complete(tokenizer_folder: Path, encode: Callable) -> None:
    from pydoc_data.topics import topics

    prepared = prepare(TextData("pydoc", seq_len=512, validation=0.1), tokenizer_folder)
    assert documents_of(prepared) == [encode(topics[k]) for k in sorted(topics)]
    train, validation = prepared.report.train.packing, prepared.report.validation.packing
    assert train.documents_in + validation.documents_in == len(topics)
    assert "held out" in prepared.report.validation.held_out


def test_training_process_stays_free_of_heavy_packages(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable
) -> None:
    code = f"""
import sys
import skimp.data
assert not [m for m in ("torch", "numpy") if m in sys.modules], "listing must import nothing"
from skimp.data import TextData, prepare
for streaming in (False, True):
    data = TextData({str(write_jsonl(TEXTS))!r}, seq_len=16, streaming=streaming)
    stream = prepare(data, {str(tokenizer_folder)!r}).stream(32)
    stream.next_step()
    stream.close()
heavy = ("datasets", "pyarrow", "tokenizers", "transformers", "pandas", "sklearn", "peft", "torchao")
print([m for m in heavy if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_long_documents_are_cut_into_blocks_without_changing_tokens(
    tmp_path: Path, tokenizer_folder: Path, encode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n\n".join(document(i, 40) for i in range(8000))  # 1.3 MB, blocks are 1 MiB
    (tmp_path / "long.txt").write_text(text)
    prepared = prepare(TextData(str(tmp_path / "long.txt"), seq_len=128), tokenizer_folder)
    assert TokenStore(Path(prepared.report.train.folder)).meta["counts"]["documents_in_blocks"] == 1
    assert documents_of(prepared) == [encode(text)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "fine"', ["row 3", "JSON object"]),
        (b'["a list"]', ["row 3", "a JSON list"]),
        (b'{"body": "x", "title": "y"}', ["row 3", "field 'text'", "body, title", "data.field=body"]),
        (b'{"text": 7, "body": "x"}', ["row 3", "type int", "data.field=body"]),
        (b'{"text": null}', ["row 3", "null"]),
        (b'{"text": "caf\xe9"}', ["row 3", "byte 0xe9 at byte offset 55", "data.encoding=latin-1"]),
        (b'{"text": "\\ud83d"}', ["row 3", "surrogate"]),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_named(
    tmp_path: Path, tokenizer_folder: Path, line: bytes, words: list[str], streaming: bool
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "the cat sat"}\n{"text": "a mat"}\n' + line + b"\n")
    with pytest.raises(DataError) as raised:
        prepare(TextData(str(path), seq_len=4, streaming=streaming), tokenizer_folder).stream(4).next_step()
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_encoding_is_the_way_out(tmp_path: Path, tokenizer_folder: Path, encode: Callable) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(("the cat " * 20 + "café").encode("latin-1"))
    with pytest.raises(DataError, match="byte 0xe9 at byte offset 163"):
        prepare(TextData(str(path), seq_len=4), tokenizer_folder)
    prepared = prepare(TextData(str(path), seq_len=4, encoding="latin-1"), tokenizer_folder)
    assert documents_of(prepared) == [encode("the cat " * 20 + "café")]


def test_files_that_are_not_there_or_not_right(tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = write_jsonl(["a"], "train.jsonl")

    def refused(source: object, **more: object) -> str:
        with pytest.raises(DataError) as raised:
            prepare(TextData(str(source), seq_len=4, **more), tokenizer_folder)
        return str(raised.value)

    assert f"did you mean {path}" in refused(tmp_path / "trian.jsonl")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert "empty file" in refused(tmp_path / "empty.jsonl")
    (tmp_path / "x.xlsx").write_text("[]")
    assert "kinds that are read: .jsonl, .json, .parquet, .csv" in refused(tmp_path / "x.xlsx")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.xls").write_text("a")
    assert "endings .xls" in refused(tmp_path / "folder")
    assert "nothing there" in refused(tmp_path / "*.nothing")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(path.read_bytes() * 50)[:-12])
    assert "cut.jsonl.gz" in refused(tmp_path / "cut.jsonl.gz")
    assert "not of the kind" in refused(tmp_path / "cut.jsonl.gz")
    (tmp_path / "not.parquet").write_bytes(b"no parquet at all")
    assert "not.parquet" in refused(tmp_path / "not.parquet")
    (tmp_path / "blank.txt").write_text(" \n ")
    assert "nothing is left to train on" in refused(tmp_path / "blank.txt")
    assert "'pydoc'" in refused("pydocs")
    assert "Hub" in refused("nobody/has-this")
    long = write_jsonl(["a", "the cat sat on a mat and saw two dogs"], "long.jsonl")
    assert f"{long}, row 2" in refused(long, too_long="error")


def test_parquet_without_the_column(tmp_path: Path, tokenizer_folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="fields there: body, n"):
        prepare(TextData(str(tmp_path / "t.parquet"), seq_len=4), tokenizer_folder)
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="row 2"):
        prepare(TextData(str(tmp_path / "t.parquet"), seq_len=4), tokenizer_folder)


def test_hub_rows_are_read_by_a_client_in_the_child(
    tmp_path: Path, tokenizer_folder: Path, encode: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package `datasets`, found by the child alone."""
    stand_in = tmp_path / "stand_in"
    stand_in.mkdir()
    (stand_in / "datasets.py").write_text(
        "def load_dataset(name, config, *, split, revision, streaming):\n"
        "    assert streaming and (name, config, revision, split) == ('some/where', 'small', 'abc', 'test')\n"
        "    return [{'text': 'the cat'}, {'text': 'a mat'}]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    monkeypatch.syspath_prepend(str(stand_in))
    prepared = prepare(TextData("some/where:small@abc#test", seq_len=4), tokenizer_folder)
    assert documents_of(prepared) == [encode("the cat"), encode("a mat")]


def test_vocabulary_of_another_model(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl(TEXTS))
    for streaming in (False, True):
        with pytest.raises(ModelError, match=r"a model with 50 token embeddings(.|\n)*the tokenizer has \d+ tokens"):
            prepare(TextData(path, seq_len=16, streaming=streaming), tokenizer_folder, vocabulary=50)
    prepare(TextData(path, seq_len=16), tokenizer_folder, vocabulary=300)


def test_tokenizers_that_will_not_do(tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable) -> None:
    data = TextData(str(write_jsonl(TEXTS)), seq_len=16)
    with pytest.raises(ModelError, match="no such file"):
        prepare(data, tmp_path / "none")
    with pytest.raises(ModelError, match="no tokenizer there"):
        prepare(data, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    with pytest.raises(ModelError, match="end-of-document"):
        prepare(data, alone)
    assert prepare(data, alone / "tokenizer.json", end="<end>").report.end_token == 0
    (alone / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        prepare(data, alone / "tokenizer.json", end="<end>")


def test_length_limit_and_padding_inside_a_tokenizer_are_ignored_and_begin_token_kept(
    tmp_path: Path, write_jsonl: Callable
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "the", "cat", "sat"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    prepared = prepare(TextData(str(write_jsonl(["the cat sat", "the dog"])), seq_len=4), tmp_path)
    assert documents_of(prepared) == [[1, 3, 4, 5, 2], [1, 3, 0, 2]]
    assert prepared.report.train.unknown_tokens == 1
    assert prepared.report.begin_token == 1


def test_validation_is_disjoint_deterministic_and_stated(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl([document(i, 5) for i in range(100)]))

    def texts(rows: object) -> set[tuple[int, ...]]:
        batch = rows.batch(range(len(rows)))
        return {tuple(batch.ids[r, : d[1]].tolist()) for r, d in enumerate(batch.documents)}

    def sides(**more: object) -> tuple[set, set]:
        prepared = prepare(TextData(path, seq_len=32, packing=False, **more), tokenizer_folder)
        return texts(prepared.train), texts(prepared.validation)

    train, held = sides(validation=0.2)
    assert (len(train), len(held)) == (80, 20)
    assert not train & held
    assert sides(validation=0.2) == (train, held)
    assert sides(validation=0.2, seed=1)[1] != held
    few = sides(validation_tokens=50)[1]  # no more tokens than that, and the next document would be too much
    assert 50 - 16 < sum(map(len, few)) <= 50
    assert few < sides(validation=0.2, validation_tokens=10**6)[1] == held
    assert len(sides(validation=0.2, validation_tokens=1)[1]) == 1
    other = write_jsonl([document(7, 5), document(500, 5)], "other.jsonl")
    report = prepare(TextData(path, seq_len=32, validation=str(other)), tokenizer_folder).report
    assert report.validation.packing.documents_in == 2
    assert "1 of 2 validation documents are also training documents" in report.notes[0]
    capped = TextData(path, seq_len=32, validation=str(other), validation_tokens=12)
    report = prepare(capped, tokenizer_folder).report
    assert report.validation.packing.documents_in == 1
    assert "1 of 2 documents taken" in report.validation.held_out
    with pytest.raises(DataError, match="nothing would be left"):
        prepare(TextData(path, seq_len=32, validation_tokens=10**6), tokenizer_folder)


def test_validation_batches_are_the_same_every_time(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    data = TextData(str(write_jsonl([document(i, 9) for i in range(60)])), seq_len=16, validation=0.5)
    prepared = prepare(data, tokenizer_folder)
    once, twice = (list(prepared.validation_batches(max_tokens=90, rows=2)) for _ in range(2))
    assert [b.rows for b in once] == [2, 2, 1]
    assert all((a.ids == b.ids).all() for a, b in zip(once, twice, strict=True))
    assert sum(b.rows for b in prepared.validation_batches(rows=7)) == len(prepared.validation)


def test_sources_have_ids(tokenizer_folder: Path, write_jsonl: Callable, tmp_path: Path) -> None:
    one = write_jsonl([document(i, 4) for i in range(5)], "a/one.jsonl")
    write_jsonl(["", ""], "a/two.jsonl")  # a file without a usable document
    other = write_jsonl([document(i, 4) for i in range(50, 53)], "b.jsonl")
    data = TextData([str(one.parent), str(other)], seq_len=64, packing=False)
    prepared = prepare(data, tokenizer_folder)
    assert prepared.train.batch(range(8)).source.tolist() == [0] * 5 + [1] * 3


def test_death_of_the_child_is_told(tokenizer_folder: Path, write_jsonl: Callable, tmp_path: Path) -> None:
    job = {"tokenizer": str(tokenizer_folder), "field": "text", "encoding": "utf-8", "stores": []}
    running = child_module.Child({**job, "stream": {"files": [], "file": 0, "row": 1, "offset": 0}})
    os.kill(running.process.pid, signal.SIGKILL)
    assert "SIGKILL, most likely because memory ran out" in str(running.death())
    running.stop()
    with pytest.raises(DataError, match="ended with code 1: KeyError"):
        run_to_end({k: v for k, v in job.items() if k != "stores"})


def test_progress_is_shown_and_an_interrupted_preparation_leaves_nothing(
    tokenizer_folder: Path, write_jsonl: Callable, own_cache: Path
) -> None:
    data = TextData(str(write_jsonl(TEXTS * 1000)), seq_len=16)

    def interrupt(record: dict) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(data, tokenizer_folder, progress=interrupt)
    assert list((own_cache / "tokens").iterdir()) == []
    seen: list[dict] = []
    prepare(data, tokenizer_folder, progress=seen.append)
    assert seen[0]["set"] == "train"
    assert {"file", "rows", "tokens", "files", "files_done"} <= set(seen[0])


def test_no_room_is_told_and_leaves_nothing(
    tokenizer_folder: Path, write_jsonl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StoreWriter, tokens: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(StoreWriter, "add", full)
    sources = [s.as_dict() for s in find_sources([str(write_jsonl(TEXTS))], "data.train")]
    store = {"set": "train", "folder": str(tmp_path / "tokens" / "key"), "sources": sources, "records": []}
    job = {"field": "text", "encoding": "utf-8"}
    with pytest.raises(DataError, match=r"cannot be written: No space left(.|\n)*SKIMP_CACHE"):
        tokenise._write(store, job, load_tokenizer(str(tokenizer_folder), None), io.BytesIO())
    assert list((tmp_path / "tokens").iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="SKIMP_CACHE"):
        prepare(TextData(str(write_jsonl(TEXTS)), seq_len=16), tokenizer_folder, cache=tmp_path / "file" / "cache")


def test_a_folder_gives_the_tokens_transformers_gives(
    tokenizer_folder: Path, encode: Callable, write_jsonl: Callable
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    prepared = prepare(TextData(str(write_jsonl(TEXTS)), seq_len=16), tokenizer_folder)
    assert documents_of(prepared) == [[*theirs(t)["input_ids"], theirs.eos_token_id] for t in TEXTS]


@pytest.mark.slow
def test_gguf_tokenizer_of_the_real_model(smollm2_path: Path, own_cache: Path, write_jsonl: Callable) -> None:
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    texts = ["def f(x):\n    return x  # naïve 한국어 🙂", "\tThe cat\n\n\n sat.", "1234567 + 89"]
    data = TextData(str(write_jsonl(texts)), seq_len=64)
    assert documents_of(prepare(data, smollm2_path, vocabulary=49152)) == [
        [*theirs(t, add_special_tokens=False)["input_ids"], theirs.eos_token_id] for t in texts
    ]
    assert list(own_cache.glob("tokenizers/*/tokenizer.json"))  # converted once, kept
    pydoc = prepare(TextData("pydoc", seq_len=512, validation=0.05), smollm2_path, vocabulary=49152)
    batch = pydoc.stream(2048).next_step()
    assert batch.ids.shape == (4, 512)
    assert pydoc.report.train.unknown_tokens == 0


def test_store_uses_two_bytes_for_small_vocabularies(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    prepared = prepare(TextData(str(write_jsonl(TEXTS)), seq_len=16), tokenizer_folder)
    store = TokenStore(Path(prepared.report.train.folder))
    assert store.dtype == np.uint16
    assert (store.folder / "tokens.bin").stat().st_size == 2 * store.tokens
    mapped = np.memmap(store.folder / "tokens.bin", dtype=store.dtype, mode="r")
    assert mapped.tolist() == store.read(0, store.tokens).tolist()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"seq_len": 1}, "data.seq_len"),
        ({"seq_len": "8"}, "data.seq_len"),
        ({"too_long": "spilt"}, "did you mean 'split'"),
        ({"validation": 1.5}, "between 0 and 1"),
        ({"validation": 4096}, "data.validation_tokens=4096"),
        ({"validation_tokens": 0}, "data.validation_tokens"),
        ({"encoding": "utf-9"}, "data.encoding"),
        ({"train": []}, "data.train"),
        ({"streaming": True, "validation_tokens": 100}, "data.validation=0.05"),
        ({"seed": -1}, "data.seed"),
    ],
)
def test_wrong_descriptions_are_refused_by_key(keys: dict, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        TextData(**{"train": "x.txt", "seq_len": 8, **keys})
