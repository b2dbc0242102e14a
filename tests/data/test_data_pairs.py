"""Preference pairs are read and checked in full, and it is said that they are not trained on yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from data_chats import turns

from skimp.core.errors import DataError
from skimp.data import Fields, TextData, prepare
from skimp.data.pairs import pair_of
from skimp.data.readers import Record

TEXT = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
TALKS = {"chosen": turns("2 + 2?", "4"), "rejected": turns("2 + 2?", "5")}
TURNS = {"prompt": turns("2 + 2?"), "chosen": [{"role": "assistant", "content": "4"}],
         "rejected": [{"role": "assistant", "content": "5"}]}  # fmt: skip


@pytest.fixture
def refused(tmp_path: Path, tokenizer_folder: Path) -> Callable[..., str]:
    def read(rows: Sequence[Any], **keys: Any) -> str:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        with pytest.raises(DataError) as raised:
            prepare(TextData(str(path), seq_len=16, **keys), tokenizer_folder)
        return str(raised.value)

    return read


def test_forms_are_one_pair() -> None:
    for row in (TALKS, TURNS, {**TURNS, "chosen": "4", "rejected": "5"}):
        pair = pair_of(Record(1, 0, row), Fields(), "here")
        assert (pair.prompt, pair.chosen, pair.rejected) == (TURNS["prompt"], TURNS["chosen"], TURNS["rejected"])
    assert pair_of(Record(1, 0, TEXT), Fields(), "here").chosen == "4"


@pytest.mark.parametrize("streaming", [False, True])
def test_all_are_read_and_it_is_said(refused: Callable, streaming: bool) -> None:
    said = refused([TEXT] * 700, streaming=streaming)
    assert "700 pairs, read and checked: 700 as text" in said
    assert "data.format=prompt data.fields.completion=chosen" in said
    assert "data.format=messages data.fields.messages=chosen" in refused([TALKS] * 2, streaming=streaming)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**TEXT, "rejected": " "}, ["row 2", "an answer in 'rejected'"]),
        ({**TEXT, "rejected": "4"}, ["row 2", "one and the same"]),
        ({**TEXT, "rejected": None}, ["row 2", "both answers as text"]),
        ({"chosen": "a", "rejected": "b"}, ["row 2", "the prompt of a pair"]),
        ({"prompt": "a", "chosen": "b"}, ["row 2", "rejected"]),
        ({**TALKS, "rejected": turns("3 + 3?", "5")}, ["row 2", "differ in turn 1"]),
        ({**TALKS, "rejected": turns("2 + 2?", "5", "no")}, ["row 2", "end with an answer"]),
        ({**TURNS, "rejected": turns("5")}, ["row 2", "turn 1", "role user"]),
    ],
)
def test_rows_that_are_no_pairs_are_named_or_counted(refused: Callable, row: dict, words: list[str]) -> None:
    said = refused([TEXT, row, TEXT])
    for word in words:
        assert word in said
    assert "2 pairs, read and checked: 2 as text; 1 left out:" in refused([TEXT, row, TEXT], bad_rows="drop")


def test_the_better_answers_can_be_trained_on(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(TEXT) + "\n")
    data = TextData(str(tmp_path / "pairs.jsonl"), seq_len=32, format="prompt", fields=Fields(completion="chosen"))
    assert prepare(data, tokenizer_folder).report.train.packing.trained_tokens == 2
