"""Rows from documents: every token is accounted for, and labels, positions and offsets are those of a plain
loop.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from skimp.core.batch import IGNORE
from skimp.core.errors import DataError
from skimp.data.packing import best_fit, lay_rows
from skimp.data.rows import Rows

PAD = 0


def rows_of(lengths: list[int], seq_len: int, **rules: object) -> tuple[Rows, object, list[np.ndarray]]:
    """Documents with tokens 1, 2, 3 … so that every token says where it came from."""
    lengths_ = np.array(lengths)
    starts = np.cumsum(lengths_) - lengths_
    tokens = np.arange(1, lengths_.sum() + 1)
    table, counts = lay_rows(starts, lengths_, seq_len, **rules)
    documents = [tokens[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    return Rows(table, lambda start, length: tokens[start : start + length], PAD), counts, documents


def check_batch(rows: Rows, counts: object) -> torch.Tensor:
    """Hold a batch of all rows against the definition, token by token; returns the ids."""
    batch = rows.batch(np.arange(len(rows)))
    assert batch.ids.shape == batch.labels.shape == batch.positions.shape == (len(rows), rows.seq_len)
    assert {batch.ids.dtype, batch.labels.dtype, batch.positions.dtype} == {torch.int64}
    trained = padding = 0
    for row in range(len(rows)):
        offsets = batch.documents[row]
        assert offsets[0] == 0
        assert offsets[-1] == rows.seq_len
        assert list(offsets) == sorted(set(offsets))
        for begin, end in itertools.pairwise(offsets):
            ids, labels = batch.ids[row, begin:end], batch.labels[row, begin:end]
            assert torch.equal(batch.positions[row, begin:end], torch.arange(end - begin))
            assert labels[-1] == IGNORE
            if ids[0] == PAD:  # tokens of the test begin at 1, so this is the padding
                assert end == rows.seq_len
                assert (ids == PAD).all()
                assert (labels == IGNORE).all()
                padding += end - begin
            else:
                assert torch.equal(labels[:-1], ids[1:])
                assert (ids.diff() == 1).all()  # neighbours in the text: no document boundary inside
                trained += end - begin - 1
    assert batch.trained == trained == counts.trained_tokens
    assert padding == counts.padding_tokens
    lost = counts.truncated_tokens + counts.dropped_tokens + counts.tail_tokens
    assert counts.tokens_in == counts.tokens + lost
    assert counts.tokens + counts.padding_tokens == batch.ids.numel()
    return batch.ids


def test_b11_split_loses_nothing() -> None:
    rows, counts, _ = rows_of([4, 2, 3, 1], 3)
    ids = check_batch(rows, counts)
    # [1 2 3] [4|5 6] [7 8 9] [10]: the last row has one token, which predicts nothing, and is counted as the
    # tail
    assert ids.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert (counts.tokens_in, counts.tokens, counts.tail_tokens) == (10, 9, 1)
    assert counts.split_documents == 1


def test_b12_truncate_never_begins_in_the_middle_of_a_document() -> None:
    rows, counts, documents = rows_of([4, 2, 3, 1], 3, too_long="truncate")
    ids = check_batch(rows, counts)
    firsts = {int(d[0]) for d in documents}
    batch = rows.batch(range(len(rows)))
    for row, offsets in enumerate(batch.documents):
        assert {int(ids[row, o]) for o in offsets[:-1]} <= firsts | {PAD}
    assert counts.truncated_tokens == 1
    assert counts.rows == 3


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
@pytest.mark.parametrize("seq_len", [2, 3, 7, 64, 123])
def test_every_rule_keeps_count(packing: bool, too_long: str, seq_len: int) -> None:
    drawn = np.random.default_rng(seq_len).integers(2, 3 * seq_len, 57).tolist()
    lengths = [*drawn, 2, seq_len, seq_len + 1]
    rows, counts, documents = rows_of(lengths, seq_len, packing=packing, too_long=too_long)
    ids = check_batch(rows, counts)
    seen = ids[ids != PAD]
    assert len(seen.unique()) == len(seen)  # no token twice
    whole = [d[:seq_len] if too_long == "truncate" else d for d in documents]
    whole = [d for d in whole if too_long != "drop" or len(d) <= seq_len]
    expected = set(np.concatenate(whole).tolist())
    assert set(seen.tolist()) <= expected
    assert len(expected) - len(seen) == counts.tail_tokens
    if too_long != "split":
        assert counts.tail_tokens == 0
        assert counts.split_documents == 0
    elif packing:
        assert counts.tail_tokens <= 1 or seq_len == 2


def test_unpacked_rows_hold_one_piece_each() -> None:
    rows, counts, _ = rows_of([5, 3, 7], 3, packing=False)
    assert check_batch(rows, counts).tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    assert counts.tail_tokens == 1  # the seventh token of the last document, alone in its piece
    assert rows.batch([1]).documents == ((0, 2, 3),)


def test_best_fit_equals_the_plain_loop() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        capacity = int(random.integers(5, 70))
        lengths = random.integers(1, capacity + 1, 80)
        free: list[int] = []
        rows: list[list[int]] = []
        for item in np.argsort(-lengths, kind="stable"):
            room = [(f, r) for r, f in enumerate(free) if f >= lengths[item]]
            if room:
                _, row = min(room)
            else:
                row = len(free)
                free.append(capacity)
                rows.append([])
            free[row] -= lengths[item]
            rows[row].append(int(item))
        order, first = best_fit(lengths, capacity)
        got = [order[a:b].tolist() for a, b in itertools.pairwise(first)]
        assert [sorted(r) for r in got] == [sorted(r) for r in rows]
        assert len(got) >= -(-lengths.sum() // capacity)


def test_best_fit_on_equal_lengths_is_exact() -> None:
    _, first = best_fit(np.full(23, 5), 17)
    assert len(first) - 1 == -(-23 // 3)


def test_error_names_the_place_and_the_length() -> None:
    with pytest.raises(DataError, match=r"here 1: .*= 4 tokens\n.*9 tokens, and 1 more"):
        rows_of([3, 9, 2, 5], 4, too_long="error", place=lambda d: f"here {d}")


def test_b09_nothing_left_names_the_length_needed() -> None:
    with pytest.raises(DataError, match="nothing is left to train on") as raised:
        rows_of([40, 50], 8, too_long="drop")
    assert "data.seq_len=50" in raised.value.instead


def test_source_is_that_of_the_first_document_of_the_row() -> None:
    rows, _, _ = rows_of([3, 3, 6], 6, sources=np.array([0, 0, 1]))
    assert rows.batch([0, 1]).source.tolist() == [0, 1]


def test_b13_packed_loss_is_the_token_weighted_mean_of_the_separate_ones() -> None:
    """A model that sees only positions and the earlier tokens of the same document: cumulative mean of
    embeddings. Packed with the declared offsets it must give the loss and gradients of the documents on their
    own (float64)."""
    torch.manual_seed(0)
    table = torch.randn(40, 7, dtype=torch.float64)
    places = torch.randn(40, 7, dtype=torch.float64)

    def loss(ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, offsets: tuple[int, ...],
             weight: torch.Tensor) -> torch.Tensor:  # fmt: skip
        total = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.pairwise(offsets):
            hidden = (weight[ids[a:b]] + places[positions[a:b]]).cumsum(0) / torch.arange(1, b - a + 1)[:, None]
            logits = hidden @ weight.T
            total = total + torch.nn.functional.cross_entropy(logits, labels[a:b], ignore_index=IGNORE, reduction="sum")
        return total

    lengths = [5, 11, 3]
    packed, _, documents = rows_of(lengths, 23)
    batch = packed.batch([0])
    one = table.clone().requires_grad_()
    (loss(batch.ids[0], batch.positions[0], batch.labels[0], batch.documents[0], one) / batch.trained).backward()
    other = table.clone().requires_grad_()
    parts = []
    for tokens in documents:
        ids = torch.from_numpy(tokens)
        labels = torch.cat([ids[1:], torch.tensor([IGNORE])])
        parts.append(loss(ids, torch.arange(len(ids)), labels, (0, len(ids)), other))
    (sum(parts) / (sum(lengths) - len(lengths))).backward()
    assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-14)
