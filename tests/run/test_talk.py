"""A conversation is the template's text: its end token ends an answer, and a missing template is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from skimp.core.errors import DataError, ModelError
from skimp.run.talk import Talk
from skimp.run.words import Words

TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def words(tiny_folder: Path, tmp_path: Path) -> Words:
    folder = shutil.copytree(tiny_folder, tmp_path / "chatty")
    (folder / "chat_template.jinja").write_text(TURNS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": "<end>"}))
    return Words(folder, {"vocab_size": 320})


def test_turns_are_what_the_template_writes(words: Words) -> None:
    talk = Talk(words, system="be brief")
    first = talk.ask("the cat")
    text = "<end>[system]be brief<end>[user]the cat<end>[assistant]"
    assert first == words.encode(text, whole=False)
    talk.answered("sat")
    again = talk.ask("on a mat")
    assert again == words.encode(text + "sat<end>[user]on a mat<end>[assistant]", whole=False)
    talk.forget()
    assert talk.ask("the cat") == first


def test_the_token_behind_an_answer_ends_it(tiny_folder: Path, tmp_path: Path) -> None:
    """A base model's end of text is one token, its chat template's end of turn another."""
    folder = shutil.copytree(tiny_folder, tmp_path / "two")
    described = json.loads((folder / "tokenizer.json").read_text())
    turn = {"id": 300, "content": "<turn>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    described["added_tokens"].append({**turn, "normalized": False})
    (folder / "tokenizer.json").write_text(json.dumps(described))
    words = Words(folder, {"vocab_size": 320})
    assert words.ends == {0}
    assert Talk(words, template=_file(tmp_path, TURNS.replace("<end>", "<turn>"))).ends == {0, 300}


def _file(folder: Path, text: str) -> str:
    (folder / "t.jinja").write_text(text)
    return str(folder / "t.jinja")


def test_no_template_is_told_and_one_can_be_named(tiny_folder: Path, tmp_path: Path) -> None:
    words = Words(tiny_folder, {"vocab_size": 320})
    with pytest.raises(ModelError, match=r"no chat template[\s\S]*--template chatml[\s\S]*skimp generate"):
        Talk(words)
    assert Talk(words, "chatml").ask("a") == words.encode(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", whole=False
    )
    with pytest.raises(DataError, match=r"nowhere\.jinja"):
        Talk(words, "nowhere.jinja")


def test_a_template_that_refuses_the_turns_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    words = Words(tiny_folder, {"vocab_size": 320})
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TURNS
    talk = Talk(words, _file(tmp_path, refusing))
    assert talk.ask("a")
    with pytest.raises(ModelError, match=r"no system here[\s\S]*without --system"):
        Talk(words, _file(tmp_path, refusing), system="be brief")
