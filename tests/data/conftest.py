"""A tiny byte-level tokenizer and text files, built on the spot; tokens cached in the test's own folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from data_texts import WORDS


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE, about 300 tokens, pad = eos = <end>."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([" ".join(WORDS)] * 4, vocab_size=300, special_tokens=["<end>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "pad_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def encode(tokenizer_folder: Path) -> Callable[[str], list[int]]:
    """Plain encoding with the end token after it: the reference for every test."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    return lambda text: [*tokenizer.encode(text, add_special_tokens=False).ids, end]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    return tmp_path / "cache"


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(texts: Sequence[str], name: str = "text.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
        return path

    return write
