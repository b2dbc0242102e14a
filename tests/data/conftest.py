"""A tiny byte-level tokenizer and text files, built on the spot; tokens cached in the test's own folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's own tokenizer as a folder, taken from the GGUF file without transformers (which takes ten seconds)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from skimp.recipe import gguf_header

    def whole_array(self: Any, key: str, fields: dict) -> None:
        kind, length = self.take("I"), self.take("Q")
        code = gguf_header._SCALARS.get(kind)
        fields[key] = [self.take(code) if code else self.text() for _ in range(length)]

    with pytest.MonkeyPatch.context() as patch:  # elsewhere the tokenizer's long arrays are passed over
        patch.setattr(gguf_header._Cursor, "_array", whole_array)
        fields = gguf_header.read_header(smollm2_path).fields
    words, merges, kinds = (fields[f"tokenizer.ggml.{n}"] for n in ("tokens", "merges", "token_type"))
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(w, special=True) for w, kind in zip(words, kinds, strict=True) if kind == 3]
    )
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    return folder
