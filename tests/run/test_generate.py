"""Generation over the cache: token by token what transformers gives, in pieces or at once, and reproducible."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.core.errors import ModelError, RecipeError
from skimp.run import generate
from skimp.run.found import find
from skimp.run.generate import Decoder, Generated, stream
from skimp.run.opened import Opened, open_model
from skimp.run.sampling import Sampling

PROMPT = [5, 17, 250, 3, 3, 90, 120]


@pytest.fixture
def opened(make_tiny: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> Callable[..., tuple[Opened, Any]]:
    """`opened("qwen2", **config)`: a tiny model as skimp opens it, and as transformers has it."""

    def build(family: str = "llama", **changes: Any) -> tuple[Opened, Any]:
        theirs = make_tiny(family, vocab_size=320, **changes).eval()
        theirs.save_pretrained(tmp_path / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_folder / name, tmp_path / family / name)
        with find(str(tmp_path / family)) as found:
            return open_model(found), theirs

    return build


def greedy(opened: Opened, prompt: list[int], tokens: int) -> list[int]:
    return list(stream(Decoder(opened), prompt, tokens, Sampling()))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("piece", [512, 3])
def test_greedy_is_transformers_greedy(
    opened: Callable[..., Any], family: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "PIECE", piece)
    ours, theirs = opened(family)
    with torch.no_grad():
        expected = theirs.generate(
            torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert greedy(ours, PROMPT, 40) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_logit_over_the_cache_is_that_of_the_whole_text(opened: Callable[..., Any], family: str) -> None:
    ours, theirs = opened(family)
    text = [*PROMPT, 9, 200, 31, 7]
    with torch.no_grad():
        whole = theirs(torch.tensor([text])).logits[0]
    decoder = Decoder(ours)
    for start, stop in ((0, 4), (4, 5), (5, 9), (9, 11)):
        logits = decoder.feed(text[start:stop])
        torch.testing.assert_close(logits, whole[stop - 1], rtol=1e-4, atol=1e-5)


def test_another_turn_reads_only_what_is_new(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = opened("llama")
    decoder, fed = Decoder(ours), []
    feed = Decoder.feed

    def counted(self: Decoder, ids: Any) -> Any:
        fed.append(len(ids))
        return feed(self, ids)

    monkeypatch.setattr(Decoder, "feed", counted)
    decoder.turn_to(PROMPT)
    other = [*PROMPT[:4], 8, 9, 10]
    logits = decoder.turn_to(other)
    assert fed == [7, 3]
    torch.testing.assert_close(logits, Decoder(ours).feed(other), rtol=1e-5, atol=1e-6)
    # The same text again: its last token is read once more, for its logits.
    torch.testing.assert_close(decoder.turn_to(other), logits, rtol=1e-5, atol=1e-6)
    assert fed[-1] == 1


def test_it_stops_at_an_end_token_at_the_length_and_where_positions_end(opened: Callable[..., Any]) -> None:
    ours, _ = opened("llama", max_position_embeddings=16)
    free = greedy(ours, PROMPT, 100)
    done = Generated()
    assert list(stream(Decoder(ours), PROMPT, 100, Sampling(), into=done)) == free
    assert (len(free), done.stop) == (16 - len(PROMPT), "positions")
    done = Generated()
    short = list(stream(Decoder(ours), PROMPT, 100, Sampling(), ends={free[3]}, into=done))
    assert (short, done.stop) == (free[: free.index(free[3])], "end")
    done = Generated()
    assert list(stream(Decoder(ours), PROMPT, 2, Sampling(), into=done)) == free[:2]
    assert done.stop == "length"
    with pytest.raises(ModelError, match=r"16 positions[\s\S]*shorter prompt"):
        list(stream(Decoder(ours), [3] * 16, 1, Sampling()))


def test_sampling_depends_on_seed_place_and_number_and_on_nothing_else(opened: Callable[..., Any]) -> None:
    ours, _ = opened("llama")
    rule = Sampling(temperature=1.5, top_p=0.95, seed=3)
    once = list(stream(Decoder(ours), PROMPT, 20, rule))
    torch.manual_seed(99)
    assert list(stream(Decoder(ours, room=200), PROMPT, 20, rule)) == once
    assert list(stream(Decoder(ours), PROMPT, 20, rule, number=1)) != once
    assert list(stream(Decoder(ours), PROMPT, 20, Sampling(temperature=1.5, top_p=0.95, seed=4))) != once


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_what_is_cut_off_is_what_transformers_cuts_off(options: dict[str, Any]) -> None:
    from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    from transformers.generation.logits_process import TemperatureLogitsWarper

    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 3
    theirs = LogitsProcessorList([TemperatureLogitsWarper(0.8)])
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in options:
            theirs.append(kind(options[name]))
    expected = torch.softmax(theirs(torch.tensor([[1]]), logits[None].clone())[0], -1)
    chances, order = Sampling(temperature=0.8, **options).chances(logits)
    ours = torch.zeros(200)
    ours[order] = chances / chances.sum()
    torch.testing.assert_close(ours, expected)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -50.0])
    rule = Sampling(temperature=1.0)
    counts = [0] * 4
    for number in range(4000):
        counts[rule.choose(logits.clone(), [1, 2], number)] += 1
    expected = (torch.softmax(logits, 0) * 4000).tolist()
    assert counts[3] == 0
    # Five standard deviations of a binomial count: a fixed seed, so it either holds or never will.
    for count, mean in zip(counts[:3], expected[:3], strict=True):
        assert abs(count - mean) < 5 * (mean * (1 - mean / 4000)) ** 0.5


def test_repetition_penalty_is_the_published_rule() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.tensor([2.0, -1.0, 2.5, 0.5])
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[2, 1, 2]]), logits[None].clone())[0]
    ours = logits.clone()
    assert Sampling(repetition_penalty=1.5).choose(ours, [2, 1, 2]) == int(expected.argmax()) == 0
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -1.0}, "--temperature: 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p"),
        ({"temperature": 1.0, "min_p": 1.0}, "--min-p"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"top_k": 5}, r"--top-k at temperature 0[\s\S]*ignored"),
    ],
)
def test_an_option_out_of_range_or_without_effect_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Sampling(**options)
