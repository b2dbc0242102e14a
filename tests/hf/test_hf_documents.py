"""Boundaries that a collator declares, and rows packed for a trainer: equal to each document on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from skimp.core import attention
from skimp.core.errors import DataError
from skimp.hf import Declared, pack
from skimp.hf.forward import Forward


def declare(**batch: Any) -> Any:
    tensors = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in batch.items()}
    return Declared(lambda features: tensors)(None)


def test_rows_without_declarations_are_one_document() -> None:
    assert declare(input_ids=[[5, 6, 7], [8, 9, 1]])["documents"] == ((0, 3), (0, 3))


def test_positions_say_where_documents_begin() -> None:
    batch = declare(input_ids=[[5, 6, 7, 8, 9]], position_ids=[[0, 1, 0, 0, 1]], cu_seq_lens_q=[0, 2, 3, 5], seq_idx=1)
    assert batch["documents"] == ((0, 2, 3, 5),)
    assert set(batch) == {"input_ids", "position_ids", "documents"}


def test_padding_is_a_last_document_and_its_mask_stays() -> None:
    batch = declare(input_ids=[[5, 6, 0, 0], [7, 8, 9, 4]], attention_mask=[[1, 1, 0, 0], [1, 1, 1, 1]])
    assert batch["documents"] == ((0, 2, 4), (0, 4))
    assert batch["attention_mask"].sum() == 6


def test_packed_and_padded() -> None:
    batch = declare(input_ids=[[5, 6, 7, 0, 0]], position_ids=[[0, 1, 0, 0, 1]], attention_mask=[[1, 1, 1, 0, 0]])
    assert batch["documents"] == ((0, 2, 3, 5),)
    batch = declare(input_ids=[[5, 6, 7, 0, 0]], position_ids=[[0, 1, 2, 3, 4]], attention_mask=[[1, 1, 1, 0, 0]])
    assert batch["documents"] == ((0, 3, 5),)


@pytest.mark.parametrize("mask", [[[0, 1, 1]], [[1, 0, 1]], [[0, 0, 0]]], ids=["left", "middle", "nothing"])
def test_other_padding_is_refused(mask: list[list[int]]) -> None:
    with pytest.raises(DataError, match="padded on the right"):
        declare(input_ids=[[5, 6, 7]], attention_mask=mask)


@pytest.mark.parametrize("positions", [[[0, 1, 5]], [[3, 4, 5]]])
def test_positions_that_jump_are_refused(positions: list[list[int]]) -> None:
    with pytest.raises(DataError, match="restart at 0"):
        declare(input_ids=[[5, 6, 7]], position_ids=positions)


def test_split_rows_hold_every_token_once() -> None:
    texts = [list(range(3, 3 + n)) for n in (7, 2, 11)]
    rows, counts = pack([{"input_ids": t} for t in texts], 8)
    assert counts.tokens_in == 20 == sum(len(r["input_ids"]) for r in rows) - counts.padding_tokens + counts.tail_tokens
    flat = [int(i) for r in rows for i in r["input_ids"]][: counts.tokens]
    assert flat == [token for text in texts for token in text]
    for row in rows:
        begins = row["position_ids"] == 0
        assert bool((row["labels"][begins] == -100).all())
    assert sum(int((r["labels"] != -100).sum()) for r in rows) == counts.trained_tokens


def test_chats_are_not_cut_to_fill_a_row_and_keep_their_labels() -> None:
    examples = [{"input_ids": list(range(3, 3 + n)), "labels": [-100] * 2 + list(range(5, 3 + n))} for n in (5, 9, 3)]
    rows, counts = pack(examples, 8, too_long="truncate", pad_token_id=1)
    assert counts.truncated_documents == 1
    assert [int((r["labels"] != -100).sum()) for r in rows] == [6, 4]
    ids = [[int(i) for i in r["input_ids"]] for r in rows]
    assert ids == [list(range(3, 11)), [3, 4, 5, 6, 7, 3, 4, 5]]
    one, _ = pack(examples[:1], 8, too_long="drop", pad_token_id=1)
    assert [int(i) for i in one[0]["input_ids"]] == [3, 4, 5, 6, 7, 1, 1, 1]
    assert [int(i) for i in one[0]["position_ids"]] == [0, 1, 2, 3, 4, 0, 1, 2]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "none"),
        ([{"input_ids": []}], "example 0"),
        ([{"input_ids": [3, 4]}, {"input_ids": [3], "labels": [3, 4]}], "example 1"),
        ([{"input_ids": [3]}], "nothing is left to train on"),
    ],
)
def test_what_cannot_be_packed_is_named(examples: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack(examples, 8)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_a_packed_row_has_the_gradients_of_its_documents(make_tiny: Callable[..., Any], family: str) -> None:
    """In float64: no token sees another document, and no document predicts the first token of the next."""
    texts = [list(range(3, 3 + n)) for n in (6, 11, 4)]
    model = make_tiny(family).double()
    model.set_attn_implementation(attention.register())
    forward = Forward(model)
    rows, _ = pack([{"input_ids": t} for t in texts], 21)
    batch = Declared(lambda features: {k: torch.stack([f[k] for f in features]) for k in features[0]})(rows)
    assert sorted(b - a for a, b in zip(batch["documents"][0], batch["documents"][0][1:], strict=False)) == [4, 6, 11]
    packed = model(**batch, num_items_in_batch=1).loss
    packed.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    alone = sum(model(input_ids=(ids := torch.tensor([text])), labels=ids, num_items_in_batch=1).loss for text in texts)
    alone.backward()
    assert forward.declared == 1
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)  # HF's loss is float32
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-6 * float(p.grad.abs().max()))
    forward.remove()
    assert "forward" not in model.__dict__
