"""The stream: each row once an epoch, the same after any number of resumes, and refused for other text."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from data_texts import document

from skimp.core.batch import IGNORE, Batch
from skimp.core.errors import CheckpointError, DataError, RecipeError
from skimp.data import TextData, TokenStream, pipe, prepare, synthetic_batch, tokenise
from skimp.data.packing import lay_rows
from skimp.data.rows import Rows
from skimp.data.stream import shuffled
from skimp.data.streaming import StreamedText
from skimp.data.tokenizer import load_tokenizer
from skimp.data.window import Place


def numbered(rows: int, per_step: int, epochs: int | None = None, seed: int = 3) -> TokenStream:
    """Rows of four tokens; the first of row i is 4 i."""
    tokens = np.arange(4 * rows)
    table, _ = lay_rows(np.arange(rows) * 4, np.full(rows, 4), 4)
    return TokenStream(Rows(table, lambda a, n: tokens[a : a + n], 0), per_step, seed, {"train": "x"}, epochs)


def ids_of(batch: Batch) -> list[int]:
    return (batch.ids[:, 0] // 4).tolist()


def test_b43_every_id_once_an_epoch_and_resume_in_epoch_two_goes_on() -> None:
    """20 examples, 3 a step, 3 epochs: batches reach over the ends of epochs (B03)."""
    whole = [ids_of(b) for b in numbered(20, 3, epochs=3)]
    flat = [i for step in whole for i in step]
    epochs = [flat[k : k + 20] for k in (0, 20, 40)]
    assert all(sorted(e) == list(range(20)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [len(step) for step in whole] == [3] * 20
    for stop in range(len(whole)):
        first = numbered(20, 3, epochs=3)
        before = [ids_of(first.next_step()) for _ in range(stop)]
        second = numbered(20, 3, epochs=3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        middle = [ids_of(b) for b in itertools.islice(second, 1)]
        third = numbered(20, 3, epochs=3)
        third.load_state_dict(json.loads(json.dumps(second.state_dict())))
        assert before + middle + [ids_of(b) for b in third] == whole
        assert third.trained_tokens == 60 * 3
        assert third.steps == 20


def test_last_batch_of_a_bounded_stream_counts_its_own_tokens() -> None:
    batches = list(numbered(10, 4, epochs=1))
    assert [b.rows for b in batches] == [4, 4, 2]
    assert [b.trained for b in batches] == [12, 12, 6]
    with pytest.raises(StopIteration):
        numbered(10, 4, epochs=0).next_step()


def test_more_rows_a_step_than_there_are() -> None:
    stream = numbered(3, 7)
    flat = ids_of(stream.next_step()) + ids_of(stream.next_step())
    assert [sorted(flat[k : k + 3]) for k in (0, 3, 6, 9)] == [[0, 1, 2]] * 4


def test_step_size_may_change_on_resume() -> None:
    whole = [i for b in numbered(20, 5, epochs=2) for i in ids_of(b)]
    first = numbered(20, 3)
    begun = [i for _ in range(4) for i in ids_of(first.next_step())]
    second = numbered(20, 4, epochs=2)
    second.load_state_dict(first.state_dict())
    assert begun + [i for b in second for i in ids_of(b)] == whole


def test_order_is_fixed_for_good_and_takes_nothing_from_the_global_generator() -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].copy()
    torch_state = torch.get_rng_state()
    orders = [shuffled(50, seed, epoch, window) for seed in (0, 1) for epoch in (0, 1) for window in (0, 1)]
    assert len({tuple(o) for o in orders}) == 8
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert (np.random.get_state()[1] == state).all()
    assert torch.equal(torch.get_rng_state(), torch_state)
    # SplitMix and Philox words are defined for good: these numbers must never change, or resumes would
    assert shuffled(8, 7, 2).tolist() == ORDER


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's work and its frames, without the half second a process takes to start."""

    def begin(self: StreamedText, place: Place) -> None:
        files = [vars(f) for f in self._files]
        job = {
            **self._job,
            "stream": {"files": files, "file": place.file, "row": place.row, "offset": place.offset},
        }
        out = io.BytesIO()
        tokenise._stream(job, load_tokenizer(job["tokenizer"], None), out)
        self._frames = pipe.receive(io.BytesIO(out.getvalue()))

    monkeypatch.setattr(StreamedText, "_begin", begin)


ORDER = [6, 7, 4, 0, 1, 5, 3, 2]


def test_state_of_other_data_is_refused(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl([document(i, 9) for i in range(30)]))
    other = str(write_jsonl([document(i, 9) for i in range(31)], "other.jsonl"))
    base = {"train": path, "seq_len": 16, "seed": 0, "validation": 0.1}
    state = prepare(TextData(**base), tokenizer_folder).stream(32).state_dict()
    for change, word in (
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"seq_len": 32}, "seq_len was 16 and is 32"),
        ({"train": other}, "train was"),
        ({"packing": False}, "packing"),
        ({"too_long": "drop"}, "too_long"),
        ({"validation": 0.2}, "validation was 0.1 and is 0.2"),
        ({"validation": None, "streaming": True}, "streamed"),
    ):
        stream = prepare(TextData(**{**base, **change}), tokenizer_folder).stream(32)
        with pytest.raises(CheckpointError, match=word):
            stream.load_state_dict(state)
        stream.close()


def test_batch_tokens_must_be_whole_rows(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    prepared = prepare(TextData(str(write_jsonl(["the cat"])), seq_len=16), tokenizer_folder)
    with pytest.raises(RecipeError) as raised:
        prepared.stream(40)
    assert raised.value.instead == ["train.batch_tokens=32", "train.batch_tokens=48"]
    with pytest.raises(RecipeError, match="batch_tokens=16"):
        prepared.stream(8)


def test_b45_200_of_5000_rows_then_the_next_is_200(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    """Streaming in windows of one row keeps file order, so the next document read must be number 200."""
    path = str(write_jsonl([f"{i} the cat" for i in range(5000)]))
    data = TextData(path, seq_len=16, packing=False, streaming=True, window_rows=1)
    expected = prepare(TextData(path, seq_len=16, packing=False), tokenizer_folder).train
    with prepare(data, tokenizer_folder).stream(160) as stream:
        for _ in range(20):
            stream.next_step()
        state = json.loads(json.dumps(stream.state_dict()))
    with prepare(data, tokenizer_folder).stream(16) as stream:
        stream.load_state_dict(state)
        assert torch.equal(stream.next_step().ids, expected.batch([200]).ids)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
@pytest.mark.usefixtures("in_process")
def test_b44_streaming_resumes_twice_anywhere(
    tokenizer_folder: Path, write_jsonl: Callable, packing: bool, too_long: str
) -> None:
    """Documents shorter and longer than a row, two files, two epochs; every stop, then a second stop one step
    on.
    """
    one = write_jsonl([document(i, 1 + (i * 7) % 40) for i in range(14)], "s/one.jsonl")
    write_jsonl([document(i, 60 - i) for i in range(20, 24)], "s/two.jsonl")
    data = TextData(str(one.parent), seq_len=16, packing=packing, too_long=too_long, streaming=True, window_rows=3)
    prepared = prepare(data, tokenizer_folder)

    def batches(state: dict | None, number: int | None) -> tuple[list[torch.Tensor], dict, object]:
        with prepared.stream(32, epochs=2) as stream:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
                assert stream.state_dict() == state
            out = [b.ids for b in itertools.islice(stream, number)]
            return out, stream.state_dict(), stream.total()

    whole, last, total = batches(None, None)
    assert last["epoch"] == 2
    for stop in range(len(whole)):
        before, state, _ = batches(None, stop)
        middle, state, _ = batches(state, 1)
        after, end, counted = batches(state, None)
        joined = before + middle + after
        assert len(joined) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(joined, whole, strict=True))
        assert counted == total
        assert end == last


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
@pytest.mark.usefixtures("in_process")
def test_answers_stream_as_they_are_stored_and_resume_twice(
    tokenizer_folder: Path, tmp_path: Path, packing: bool, too_long: str
) -> None:
    """Prompts and answers shorter and longer than a row, some empty: the trained tokens are those of the store, the
    counts are kept over stops, rows left out between windows too."""
    rows = [
        {"prompt": document(i, (i * 5) % 23), "completion": "" if i % 6 == 5 else document(i, 1 + (i * 7) % 19)}
        for i in range(26)
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    keys = {"seq_len": 24, "packing": packing, "too_long": too_long}
    counts = prepare(TextData(str(path), **keys), tokenizer_folder).report.train
    prepared = prepare(TextData(str(path), streaming=True, window_rows=3, **keys), tokenizer_folder)

    def batches(state: dict | None, number: int | None) -> tuple[list[Batch], dict, object]:
        with prepared.stream(24, epochs=1) as stream:
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
            out = list(itertools.islice(stream, number))
            return out, stream.state_dict(), stream.total()

    whole, last, total = batches(None, None)
    assert total.left_out == {"completion empty": 4} == {k: n for k, n in counts.dropped.items() if n}
    assert sum(b.trained for b in whole) == total.trained_tokens
    assert (total.documents, total.untrained_documents) == (22, counts.packing.untrained_documents)
    if not (too_long == "split" and packing):  # else a window's last document is cut at its end
        assert total.trained_tokens == counts.packing.trained_tokens
        assert total.truncated_tokens == counts.packing.truncated_tokens
        assert total.untrained_tokens == counts.packing.untrained_tokens
    for stop in range(0, len(whole), 3):
        before, state, _ = batches(None, stop)
        middle, state, _ = batches(state, 1)
        after, end, counted = batches(state, None)
        joined = before + middle + after
        assert len(joined) == len(whole)
        for a, b in zip(joined, whole, strict=True):
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.labels, b.labels)
        assert (counted, end) == (total, last)


def test_streamed_split_rows_are_those_of_the_stored_text(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl([document(i, 1 + (i * 7) % 40) for i in range(40)]))
    stored = prepare(TextData(path, seq_len=16), tokenizer_folder)
    everything = stored.train.batch(range(len(stored.train)))
    prepared = prepare(TextData(path, seq_len=16, streaming=True, window_rows=4), tokenizer_folder)
    with prepared.stream(16, epochs=1) as stream:
        batches = list(stream)
        assert stream.rows_per_epoch == len(stored.train)
    rows = sorted((*b.ids[0].tolist(), *b.labels[0].tolist(), *b.documents[0]) for b in batches)
    expected = [
        (*everything.ids[r].tolist(), *everything.labels[r].tolist(), *everything.documents[r])
        for r in range(everything.rows)
    ]
    assert rows == sorted(expected)
    assert [tuple(b.ids[0].tolist()) for b in batches] != [e[:16] for e in expected]  # shuffled within windows


@pytest.mark.usefixtures("in_process")
def test_streaming_keeps_count(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl([document(i, 1 + (i * 7) % 40) for i in range(40)]))
    for too_long in ("split", "truncate", "drop"):
        for packing in (True, False):
            rules = {"seq_len": 16, "packing": packing, "too_long": too_long}
            counts = prepare(TextData(path, **rules), tokenizer_folder).report.train.packing
            prepared = prepare(TextData(path, streaming=True, window_rows=4, **rules), tokenizer_folder)
            with prepared.stream(16, epochs=1) as stream:
                batches = list(stream)
                total = stream.total()
            lost = total.truncated_tokens + total.dropped_tokens + total.tail_tokens
            assert total.documents == 40
            assert total.tokens + lost == counts.tokens_in
            assert total.rows == len(batches)
            assert total.truncated_tokens == counts.truncated_tokens
            assert total.dropped_tokens == counts.dropped_tokens


def test_streaming_says_when_nothing_is_left(tokenizer_folder: Path, write_jsonl: Callable) -> None:
    path = str(write_jsonl([document(i, 30) for i in range(5)]))
    data = TextData(path, seq_len=4, too_long="drop", streaming=True)
    with (
        prepare(data, tokenizer_folder).stream(4) as stream,
        pytest.raises(DataError, match="nothing is left"),
    ):
        stream.next_step()
    data = TextData(path, seq_len=4, too_long="error", streaming=True)
    with (
        prepare(data, tokenizer_folder).stream(4) as stream,
        pytest.raises(DataError, match="row 1: a document"),
    ):
        stream.next_step()


def test_streaming_of_a_long_text_file_in_blocks(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("\n".join(document(i, 40) for i in range(8000)))
    path = str(tmp_path / "long.txt")
    stored = prepare(TextData(path, seq_len=512), tokenizer_folder)
    data = TextData(path, seq_len=512, streaming=True, window_rows=1)
    prepared = prepare(data, tokenizer_folder)
    with prepared.stream(512 * 64, epochs=1) as stream:
        given = [b.ids for b in itertools.islice(stream, 1)]
        state = stream.state_dict()
    with prepared.stream(512 * 64, epochs=1) as stream:
        stream.load_state_dict(state)
        given += [b.ids for b in stream]
    assert torch.equal(torch.cat(given), stored.train.batch(range(len(stored.train))).ids)


def test_synthetic_batches_state_their_documents() -> None:
    batch = synthetic_batch(7, 3, 50)
    assert batch.documents == ((0, 7),) * 3
    worst = synthetic_batch(7, 3, 50, "worst_packed")
    assert worst.documents == ((0, 6, 7),) * 3
    assert worst.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0]] * 3
    for made in (batch, worst, synthetic_batch(7, 3, 50, (0, 2, 7))):
        assert made.trained == int((made.labels != IGNORE).sum())
        assert int(made.ids.max()) < 50
        trained = made.labels != IGNORE
        assert torch.equal(made.labels[:, :-1][trained[:, :-1]], made.ids[:, 1:][trained[:, :-1]])
    assert torch.equal(synthetic_batch(7, 3, 50).ids, batch.ids)
    with pytest.raises(DataError, match="rising from 0 to 7"):
        synthetic_batch(7, 3, 50, (0, 8))
