"""Text shown as it comes is the text of all tokens at once: characters of many bytes, spaces, stop texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from skimp.run.words import TextStream, Words

TEXT = "the cat sat — 한국어와 日本語, naïve 🙂🏽 and\n\tthe mat"


@pytest.fixture
def words(tiny_folder: Path) -> Words:
    return Words(tiny_folder, {"vocab_size": 320, "eos_token_id": [7, 9]})


def pieces(words: Words, ids: list[int], stream: TextStream) -> list[str]:
    out = []
    for token in ids:
        out.append(stream.add(token))
        if stream.stopped:
            break
    return [*out, stream.finish()]


def test_pieces_join_to_the_whole_and_hold_no_broken_character(words: Words) -> None:
    ids = words.encode(TEXT)
    assert len(ids) > len(TEXT)  # most characters here are several tokens each
    for repeat in (1, 5):
        shown = pieces(words, ids * repeat, TextStream(words))
        assert "".join(shown) == words.decode(ids * repeat) == TEXT * repeat
        assert not any("\ufffd" in piece for piece in shown)


def test_a_prompt_that_ends_inside_a_character_is_completed(words: Words) -> None:
    ids = words.encode("the 🙂")
    stream = TextStream(words, ids[:-2])
    assert "".join(pieces(words, ids[-2:], stream)) == "🙂"


def test_a_character_that_stays_broken_is_shown_as_such(words: Words) -> None:
    ids = words.encode("a🙂")[:-1]
    assert "".join(pieces(words, ids, TextStream(words))) == "a\ufffd"


@pytest.mark.parametrize(("stop", "left"), [("sat", "the cat "), ("t s", "the ca"), ("mat", None), ("🙂🏽 a", None)])
def test_a_stop_text_ends_it_wherever_tokens_are_cut(words: Words, stop: str, left: str | None) -> None:
    stream = TextStream(words, stops=["never there", stop])
    shown = "".join(pieces(words, words.encode(TEXT), stream))
    assert shown == stream.text == (TEXT[: TEXT.index(stop)] if left is None else left)
    assert stream.stopped == stop


def test_what_only_looked_like_a_stop_text_is_shown(words: Words) -> None:
    stream = TextStream(words, stops=["cat sits"])
    assert "".join(pieces(words, words.encode("the cat sat"), stream)) == "the cat sat"


def test_ends_are_the_tokenizers_and_the_configs(words: Words) -> None:
    assert words.ends == {7, 9, words.tokenizer.end}
