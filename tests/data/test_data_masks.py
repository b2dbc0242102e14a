"""Which tokens are trained: one bit each on disk, counted and laid into rows as a plain loop would."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from skimp.core.batch import IGNORE
from skimp.data import store as store_module
from skimp.data.packing import join_counts, join_tables, lay_rows
from skimp.data.pipe import marked, unmarked
from skimp.data.rows import Rows
from skimp.data.store import StoreWriter, TokenStore, is_complete

META = {"counts": {}, "tokenizer": {"end": 0}, "sources": []}


def written(folder: Path, documents: list[tuple[np.ndarray, np.ndarray | None]]) -> TokenStore:
    with StoreWriter(folder, 300) as writer:
        for row, (tokens, trained) in enumerate(documents, 1):
            if trained is None:
                writer.add(tokens)
            else:
                writer.add(tokens, trained)
            writer.end_document(row, 0)
        counts = {"tokens": writer.tokens, "documents": writer.documents}
        writer.commit({**META, "counts": counts})
    return TokenStore(folder)


@pytest.mark.parametrize("stretch", [1, 7, 16, 1 << 20])
def test_bits_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    """Documents of odd lengths, some trained whole and said so or not, the first of them before any mask."""
    monkeypatch.setattr(store_module, "STRETCH", stretch)
    rng = np.random.default_rng(0)
    documents: list[tuple[np.ndarray, np.ndarray | None]] = []
    for number in range(40):
        length = int(rng.integers(1, 30))
        trained = None if number < 3 or number % 7 == 0 else rng.random(length) < 0.4
        documents.append((rng.integers(0, 300, length).astype(np.uint32), trained))
    store = written(tmp_path / "store", documents)
    tokens = np.concatenate([t for t, _ in documents])
    bits = np.concatenate([np.ones(len(t), bool) if m is None else m for t, m in documents])
    assert store.masked
    assert (store.folder / "trained.bin").stat().st_size == -(-len(bits) // 8)
    assert (store.read(0, len(tokens)) == tokens).all()
    for _ in range(200):
        start = int(rng.integers(0, len(bits)))
        length = int(rng.integers(0, len(bits) - start + 1))
        assert (store.trained(start, length) == bits[start : start + length]).all()
    places = rng.permutation(np.concatenate([np.arange(len(bits) + 1), rng.integers(0, len(bits), 50)]))
    assert (store.trained_before(places) == np.append(0, np.cumsum(bits))[places]).all()
    assert is_complete(store.folder)
    (store.folder / "trained.bin").write_bytes((store.folder / "trained.bin").read_bytes()[:-1])
    assert not is_complete(store.folder)


def test_text_alone_has_no_bits(tmp_path: Path) -> None:
    store = written(tmp_path / "store", [(np.arange(9, dtype=np.uint32), None)])
    assert not store.masked
    assert store.trained(2, 3) is None
    assert sorted(p.name for p in store.folder.iterdir()) == [
        "digests.npy", "documents.npy", "meta.json", "rows.npy", "tokens.bin",
    ]  # fmt: skip
    assert json.loads((store.folder / "meta.json").read_text())["masked"] is False


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_and_counts_are_those_of_a_loop(packing: bool, too_long: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq = 11
    lengths = rng.integers(1, 30, 60)
    starts = np.cumsum(lengths) - lengths
    tokens, trained = np.arange(1, lengths.sum() + 1), rng.random(lengths.sum()) < 0.25
    sources = np.sort(rng.integers(0, 3, 60))
    before = np.append(0, np.cumsum(trained))
    table, counts = lay_rows(
        starts, lengths, seq, packing, too_long, sources, trained_before=lambda places: before[places]
    )
    rows = Rows(table, lambda a, n: tokens[a : a + n], 0, lambda a, n: trained[a : a + n])
    batch = rows.batch(range(len(rows)))
    ids, labels = batch.ids.numpy(), batch.labels.numpy()
    seen = 0
    for row, offsets in enumerate(batch.documents):
        for begin, end in itertools.pairwise(offsets):
            if ids[row, begin] == 0:
                assert (labels[row, begin:end] == IGNORE).all()
                continue
            assert labels[row, end - 1] == IGNORE
            for at in range(begin, end - 1):
                following = ids[row, at + 1]
                assert labels[row, at] == (following if trained[following - 1] else IGNORE)
            seen += end - begin
        assert (labels[row] != IGNORE).any()  # no row is computed for nothing
    assert batch.trained == counts.trained_tokens == int((labels != IGNORE).sum())
    assert seen == counts.tokens
    lost = counts.truncated_tokens + counts.dropped_tokens + counts.untrained_tokens + counts.tail_tokens
    assert counts.tokens_in == counts.tokens + lost == lengths.sum()
    if too_long == "truncate":
        idle = [not trained[s + 1 : s + min(n, seq)].any() for s, n in zip(starts, lengths, strict=True)]
        assert counts.untrained_documents == sum(idle)
        assert counts.untrained_tokens == lengths[idle].sum()
    for name in ("documents_in", "tokens_in", "tokens", "rows", "trained_tokens", "untrained_documents", "tail_tokens"):
        assert sum(of.get(name, 0) for of in counts.by_source) == getattr(counts, name)
    joined = Rows(join_tables([table, table]), lambda a, n: tokens[a : a + n], 0, lambda a, n: trained[a : a + n])
    twice = joined.batch(range(len(rows), 2 * len(rows)))
    assert (twice.ids == batch.ids).all()
    assert (twice.labels == batch.labels).all()
    assert join_counts([counts, counts]).trained_tokens == 2 * counts.trained_tokens
    assert join_counts([counts, counts]).by_source[1]["rows"] == 2 * counts.by_source[1]["rows"]


def test_marks_travel_with_tokens() -> None:
    tokens = np.array([5, 0, 2**31 - 1, 7], np.uint32)
    trained = np.array([True, False, False, True])
    ids, back = unmarked(marked(tokens, trained)[1:])
    assert ids.tolist() == [0, 2**31 - 1, 7]
    assert back.tolist() == [False, False, True]
    assert unmarked(marked(tokens, None))[1] is None
