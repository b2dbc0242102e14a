"""Many prompts at once: what each alone would give, in memory that is bounded, whatever their lengths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.core.errors import ModelError
from skimp.run.answers import answers, batches, main, rows_at_once, together
from skimp.run.found import find
from skimp.run.generate import Decoder, stream
from skimp.run.opened import Opened, open_model
from skimp.run.sampling import Sampling
from skimp.run.words import Words

PROMPTS = [[5, 17, 250, 3], [9, 9], [8, 200, 31, 7], [44], [3, 1, 4, 1], [60, 61], [90, 120, 7, 7]]


@pytest.fixture
def opened(make_tiny: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> Callable[..., Opened]:
    """`opened("qwen2", **config)`: a tiny model as skimp opens it."""

    def build(family: str = "llama", **changes: Any) -> Opened:
        make_tiny(family, vocab_size=320, **changes).save_pretrained(tmp_path / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_folder / name, tmp_path / family / name)
        with find(str(tmp_path / family)) as found:
            return open_model(found)

    return build


def alone(model: Opened, prompt: list[int], tokens: int, ends: Any = ()) -> list[int]:
    return list(stream(Decoder(model), prompt, tokens, Sampling(), ends))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("room", [1, 60_000, 10**9])
def test_together_is_each_alone_in_the_order_asked(opened: Callable[..., Opened], family: str, room: int) -> None:
    model = opened(family)
    assert answers(model, PROMPTS, 12, (), room) == [alone(model, prompt, 12) for prompt in PROMPTS]


def test_rows_that_end_leave_and_the_others_go_on(opened: Callable[..., Opened]) -> None:
    model = opened()
    four = [prompt for prompt in PROMPTS if len(prompt) == 4]
    free = [alone(model, prompt, 12) for prompt in four]
    # An end that cuts rows at different places, one of them at its first token.
    ends = {free[0][0], free[1][5]}
    expected = [alone(model, prompt, 12, ends) for prompt in four]
    assert len({len(ids) for ids in expected}) > 1
    assert expected[0] == []
    assert together(model, four, 12, ends) == expected
    assert together(model, four[:1], 12, ends) == [[]]


def test_logits_of_a_batch_are_those_of_its_rows(opened: Callable[..., Opened]) -> None:
    model = opened()
    four = [prompt for prompt in PROMPTS if len(prompt) == 4]
    decoder = Decoder(model)
    decoder.feed_rows(torch.tensor(four))
    decoder.keep_rows(torch.tensor([0, 2]))
    found = decoder.feed_rows(torch.tensor([[11], [12]]))
    for row, text in zip(found, ([*four[0], 11], [*four[2], 12]), strict=True):
        torch.testing.assert_close(row, Decoder(model).feed(text), rtol=1e-5, atol=1e-5)


def test_batches_hold_one_length_within_the_room(opened: Callable[..., Opened]) -> None:
    groups = list(batches(PROMPTS, lambda length: 3 if length > 1 else 1))
    assert sorted(i for group in groups for i in group) == list(range(len(PROMPTS)))
    assert all(len({len(PROMPTS[i]) for i in group}) == 1 for group in groups)
    assert [len(group) for group in groups] == [1, 2, 3, 1]
    model = opened()
    config = model.model.config
    size = config.hidden_size // config.num_attention_heads
    row = 4 * 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * size * 100 + 8 * config.vocab_size
    assert rows_at_once(model, 100, 5 * row) == 5
    assert rows_at_once(model, 100, 1) == 1
    assert rows_at_once(model, 1, 10**12) == 64


def test_what_cannot_go_together_is_refused(opened: Callable[..., Opened]) -> None:
    model = opened(max_position_embeddings=16)
    for prompts, tokens in (([[1, 2], [3]], 2), ([], 2), ([[1] * 10], 7)):
        with pytest.raises(ModelError, match="16 positions"):
            together(model, prompts, tokens)


def test_the_process_answers_a_file_of_questions(opened: Callable[..., Opened], tmp_path: Path) -> None:
    model = opened()
    words = Words(tmp_path / "llama", model.found.config)
    asked = ["The with", "A", "The for"]
    (tmp_path / "questions.json").write_text(json.dumps(asked))
    main([str(tmp_path / "llama"), str(tmp_path / "questions.json"), str(tmp_path / "out.json"), "9"])
    expected = [words.decode(alone(model, words.encode(text), 9, words.ends)) for text in asked]
    assert json.loads((tmp_path / "out.json").read_text()) == expected
    assert not (tmp_path / "out.json.part").exists()
