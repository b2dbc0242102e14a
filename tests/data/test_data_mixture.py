"""Mixtures with weights, several validation sets, and documents held out of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_texts import document

from skimp.core.batch import Batch
from skimp.core.errors import CheckpointError, DataError, RecipeError
from skimp.data import TextData, TrainSource, prepare
from skimp.data.mixture import next_source, rows_until_out


@pytest.fixture
def three(write_jsonl: Callable) -> list[str]:
    """Sources of 12, 40 and 5 documents, one row each without packing."""
    return [
        str(write_jsonl([document(1000 * s + i, 4 + i % 5) for i in range(n)], f"{'abc'[s]}.jsonl"))
        for s, n in enumerate((12, 40, 5))
    ]


def mixed(files: list[str], weights: tuple[float, ...], **keys: Any) -> TextData:
    train = [TrainSource(f, w, name=n) for f, w, n in zip(files, weights, "abc", strict=False)]
    return TextData(train, seq_len=16, packing=False, **keys)


def first_of(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(batch.ids[r, : batch.documents[r][1]].tolist()) for r in range(batch.rows)]


def test_no_source_is_ever_a_row_from_its_share() -> None:
    for weights in ((0.5, 0.5), (0.7, 0.2, 0.1), (0.61, 0.01, 0.38), (1 / 3, 1 / 3, 1 / 3), (0.9, 0.05, 0.03, 0.02)):
        given = [0] * len(weights)
        for rows in range(1, 2000):
            given[next_source(given, weights)] += 1
            assert all(has < w * rows + 1 for has, w in zip(given, weights, strict=True))
            assert all(has > w * rows - 2 for has, w in zip(given, weights, strict=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_shares_order_and_counts(tokenizer_folder: Path, three: list[str], streaming: bool) -> None:
    """7 : 2 : 1 over 100 rows; each source on its own is its plain stream, pass after pass."""
    data = mixed(three, (7, 2, 1), streaming=streaming, window_rows=4)
    with prepare(data, tokenizer_folder).stream(16 * 10) as stream:
        batches = [stream.next_step() for _ in range(10)]
        given = stream.given()
    sources = torch.cat([b.source for b in batches]).tolist()
    assert [sources.count(s) for s in range(3)] == [70, 20, 10]
    assert all(sources[10 * k : 10 * k + 10].count(0) == 7 for k in range(10))
    rows = [row for b in batches for row in first_of(b)]
    for source, name in enumerate("abc"):
        own = [row for row, s in zip(rows, sources, strict=True) if s == source]
        alone = TextData(three[source], seq_len=16, packing=False, streaming=streaming, window_rows=4)
        with prepare(alone, tokenizer_folder).stream(16) as plain:
            assert own == [first_of(plain.next_step())[0] for _ in own]
        assert given[name]["rows"] == len(own)
        assert given[name]["passes"] in (len(own) // (12, 40, 5)[source], len(own) // (12, 40, 5)[source] - 1)
    assert sum(g["trained_tokens"] for g in given.values()) == sum(b.trained for b in batches)


@pytest.mark.parametrize("streaming", [False, True])
def test_resumes_twice_anywhere_to_the_bit(tokenizer_folder: Path, three: list[str], streaming: bool) -> None:
    data = mixed(three[::2], (2, 1), streaming=streaming, window_rows=3)
    prepared = prepare(data, tokenizer_folder)

    def batches(state: dict | None, number: int) -> tuple[list[torch.Tensor], dict]:
        with prepared.stream(48) as stream:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
                assert stream.state_dict() == state
            out = [b.ids for b in itertools.islice(stream, number)]
            return out, stream.state_dict()

    whole, last = batches(None, 8)  # the short source is gone through almost twice
    for stop in (1, 4, 6) if streaming else range(7):
        before, state = batches(None, stop)
        middle, state = batches(state, 1)
        after, end = batches(state, 7 - stop)
        assert all(torch.equal(a, b) for a, b in zip(before + middle + after, whole, strict=True))
        assert end == last
    other = prepare(mixed(three[::2], (1, 1), streaming=streaming, window_rows=3), tokenizer_folder).stream(48)
    with pytest.raises(CheckpointError, match="weights was"):
        other.load_state_dict(last)
    other.close()


def test_a_source_that_runs_out_can_end_the_text(tokenizer_folder: Path, three: list[str]) -> None:
    prepared = prepare(mixed(three, (0.5, 0.4, 0.1), when_out="stop"), tokenizer_folder)
    rows = prepared.rows_in_all
    assert rows == prepared.rows_per_epoch == rows_until_out([12, 40, 5], [0.5, 0.4, 0.1]) == 22
    with prepared.stream(16) as stream:
        batches = list(stream)
    assert rows <= len(batches) <= 24
    seen = [row for b in batches for row in first_of(b)]
    assert len(set(seen)) == len(seen)
    with pytest.raises(DataError, match=r"run out with the first row(.|\n)*data.when_out=repeat"):
        prepare(mixed(three, (1, 1, 90), when_out="stop", validation=0.8), tokenizer_folder)
    with pytest.raises(DataError, match="not known before it was read"):
        prepare(mixed(three, (1, 1, 1), when_out="stop", streaming=True), tokenizer_folder)


def test_sources_of_several_formats_are_laid_by_their_own_rule(
    tokenizer_folder: Path, three: list[str], tmp_path: Path
) -> None:
    """Long text is cut into rows and loses nothing while long answers beside it are truncated."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": "sat " * 40}) + "\n")
    (tmp_path / "long.txt").write_text(document(1, 60))
    for train in (
        [str(tmp_path / "long.txt"), str(tmp_path / "p.jsonl")],
        [TrainSource(str(tmp_path / "long.txt"), 1.0), TrainSource(str(tmp_path / "p.jsonl"), 1.0)],
    ):
        prepared = prepare(TextData(train, seq_len=16), tokenizer_folder)
        counts = [s for report in prepared.report.trains for s in report.by_source]
        assert [c["format"] for c in counts] == ["text", "prompt"]
        assert [c["truncated_tokens"] > 0 for c in counts] == [False, True]
        assert counts[0]["rows"] > 3
        assert counts[1]["rows"] == 1
        assert sum(c["trained_tokens"] for c in counts) == prepared.tokens_per_epoch
        sources = prepared.stream(16 * 8).next_step().source.tolist()
        assert {0, 1} == set(sources)
    lines = "\n".join(prepared.report.lines())
    assert "rows of format prompt (fields prompt, completion)" in lines
    with pytest.raises(DataError, match="sources of several kinds"):
        prepare(
            TextData([str(tmp_path / "long.txt"), str(tmp_path / "p.jsonl")], seq_len=16, streaming=True),
            tokenizer_folder,
        )


def test_several_validation_sets_by_name(tokenizer_folder: Path, three: list[str]) -> None:
    data = TextData(three[0], seq_len=16, packing=False, validation={"code": three[1], "chat": [three[2], three[0]]})
    prepared = prepare(data, tokenizer_folder)
    assert {n: len(r) for n, r in prepared.validations.items()} == {"code": 40, "chat": 17}
    assert prepared.validation is prepared.validations["code"]
    assert sum(b.rows for b in prepared.validation_batches(name="chat", rows=4)) == 17
    assert [r.name for r in prepared.report.validations] == ["code", "chat"]
    assert any("12 of 17 validation documents of chat are also training documents" in n for n in prepared.report.notes)
    capped = prepare(
        TextData(three[0], seq_len=16, validation={"code": three[1]}, validation_tokens=30), tokenizer_folder
    )
    assert capped.report.validations[0].packing.tokens_in <= 30


def test_a_fraction_of_a_mixture_is_one_set_a_source(tokenizer_folder: Path, three: list[str]) -> None:
    prepared = prepare(mixed(three[:2], (1, 1), validation=0.25), tokenizer_folder)
    assert {n: len(r) for n, r in prepared.validations.items()} == {"a": 3, "b": 10}
    assert prepared.rows_per_epoch == 9 + 30


def test_an_empty_validation_set_is_named(tokenizer_folder: Path, three: list[str], tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    for validation in (str(tmp_path / "none.jsonl"), {"quiet": str(tmp_path / "none.jsonl")}):
        with pytest.raises(DataError, match=r"none.jsonl(.|\n)*2 empty(.|\n)*nothing is left to evaluate on"):
            prepare(TextData(three[0], seq_len=16, validation=validation), tokenizer_folder)
    (tmp_path / "no.jsonl").write_text("")
    with pytest.raises(DataError, match=r"data.validation.quiet: .*no.jsonl(.|\n)*empty file"):
        prepare(TextData(three[0], seq_len=16, validation={"quiet": str(tmp_path / "no.jsonl")}), tokenizer_folder)
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "the cat " * 30, "completion": "sat"}) + "\n")
    with pytest.raises(DataError, match=r"set 'validation'(.|\n)*prompt fills the row(.|\n)*evaluate"):
        prepare(TextData(three[0], seq_len=16, validation=str(tmp_path / "long.jsonl")), tokenizer_folder)


def test_documents_held_out_of_a_stream(tokenizer_folder: Path, three: list[str]) -> None:
    """Every document is on one side, the same at every start; the set stops at its number of tokens."""
    everything = prepare(TextData(three[1], seq_len=16, packing=False), tokenizer_folder)
    texts = {r for b in everything.stream(16 * 40, epochs=1) for r in first_of(b)}

    def sides(**keys: Any) -> tuple[set, set, Any]:
        data = TextData(three[1], seq_len=16, packing=False, streaming=True, window_rows=4, **keys)
        prepared = prepare(data, tokenizer_folder)
        with prepared.stream(16, epochs=1) as stream:
            train = {r for b in stream for r in first_of(b)}
            total = stream.total()
        return train, {r for b in prepared.validation_batches(rows=8) for r in first_of(b)}, total

    train, held, total = sides(validation=0.3)
    assert train | held == texts
    assert not train & held
    assert 4 < len(held) < 20
    assert total.left_out == {"held out for validation": len(held)}
    assert sides(validation=0.3)[:2] == (train, held)
    assert sides(validation=0.3, seed=5)[1] != held
    few = sides(validation=0.3, validation_tokens=20)
    assert few[0] == train
    assert few[1] < held


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ([TrainSource("a", 1.0), "b"], "a weight for every source"),
        ([TrainSource("a", 1.0), TrainSource("a", 1.0)], "a twice"),
        ([TrainSource("a", 0.0)], "above 0"),
        ([TrainSource("")], "data.train"),
    ],
)
def test_wrong_mixtures_are_refused(train: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        TextData(train, seq_len=8)
    with pytest.raises(RecipeError, match="other than train"):
        TextData("a", seq_len=8, validation={"train": "x"})
