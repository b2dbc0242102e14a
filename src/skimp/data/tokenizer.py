"""Load a tokenizer in the child process: a folder, a `tokenizer.json`, or a GGUF file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skimp.core.errors import ModelError
from skimp.data.chat import own_template


@dataclass(frozen=True)
class LoadedTokenizer:
    """A `tokenizers.Tokenizer` with padding and truncation off, and the ids this project needs.

    `begin` is set only when the tokenizer itself puts that token before every text; `size` is its largest id
    + 1. `special` are the names chat templates use, `markers` the texts of special tokens, `template` is its own
    chat template. `joins` says that ids of two texts encoded apart stand for the two texts joined (not so where a
    tokenizer puts a blank before each).
    """

    encode: Any
    end: int
    begin: int | None
    unknown: int | None
    size: int
    special: dict[str, str] = field(default_factory=dict)
    markers: tuple[str, ...] = ()
    template: str | None = None
    joins: bool = True
    path: str = ""

    def facts(self) -> dict[str, int | None]:
        return {"size": self.size, "end": self.end, "begin": self.begin, "unknown": self.unknown}


def load_tokenizer(location: str, end: str | int | None, kept: Path | None = None) -> LoadedTokenizer:
    """Read a tokenizer without the network.

    Args:
        location: a model folder, a tokenizer.json or a GGUF file.
        end: the end-of-document token or its id; None takes the tokenizer's own.
        kept: a folder to keep the converted form of a slow one in (reading a GGUF tokenizer takes seconds).

    Raises:
        ModelError: unreadable, or no end-of-document token known.
    """
    if kept is not None and (kept / "tokenizer.json").exists():
        location = str(kept)
    path = os.path.join(location, "tokenizer.json") if os.path.isdir(location) else location
    if not (path.endswith(".json") and os.path.isfile(path)):
        path = _convert(location, kept)
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelError(f"tokenizer: {path}", f"cannot be read: {error}", instead="download it again") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()  # tokenizer.json may carry a length limit that would cut documents unseen
    special = _special(os.path.dirname(path))
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
    unknown = tokenizer.token_to_id(special["unk_token"]) if special.get("unk_token") else None
    if unknown is None and getattr(tokenizer.model, "unk_token", None):
        unknown = tokenizer.token_to_id(tokenizer.model.unk_token)
    added = tokenizer.get_added_tokens_decoder()
    return LoadedTokenizer(
        tokenizer,
        _end(tokenizer, end, special, location, size),
        _begin(tokenizer, special),
        unknown,
        size,
        special,
        tuple(token.content for token in added.values() if token.special),
        own_template(os.path.dirname(path)),
        _joins(tokenizer),
        path,
    )


def with_exact_places(path: str) -> Any:
    """The tokenizer once more, for the characters of each token: a byte-level post-processor may move a token's
    place past its leading blanks."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _joins(tokenizer: Any) -> bool:
    try:
        ids = [i for text in ("a", "b") for i in tokenizer.encode(text, add_special_tokens=False).ids]
    except (
        Exception
    ):  # the Rust side raises plain Exception, here where a letter has no token and there is no unknown one
        return False
    return bool(tokenizer.decode(ids, skip_special_tokens=False) == "ab")


def _end(tokenizer: Any, end: str | int | None, special: dict[str, str], location: str, size: int) -> int:
    asked = end if end is not None else special.get("eos_token")
    if isinstance(asked, int) and 0 <= asked < size:
        return asked
    found = tokenizer.token_to_id(asked) if isinstance(asked, str) else None
    if found is None:
        raise ModelError(
            f"tokenizer: {location}: an end-of-document token",
            "none is set" if asked is None else f"{asked!r} is not in its vocabulary of {size}",
            "each document must end with one, or the model never learns to stop",
            'put "eos_token" into tokenizer_config.json beside it',
        )
    return int(found)


def _begin(tokenizer: Any, special: dict[str, str]) -> int | None:
    """The begin token, if the tokenizer's own rule puts exactly that before a text (Llama, Gemma: yes; GPT-2:
    no).
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    begin = tokenizer.token_to_id(special["bos_token"]) if special.get("bos_token") else None
    return begin if begin is not None and full[: len(full) - len(plain)][:1] == [begin] else None


def _special(folder: str) -> dict[str, str]:
    """eos, bos, unk … as tokenizer_config.json, then special_tokens_map.json, name them: text or {"content":
    text}.
    """
    names: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, file)
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as handle:
                record = json.load(handle)
        except ValueError as error:
            raise ModelError(f"tokenizer: {path}", f"not JSON: {error}", instead="download it again") from None
        for key in ("eos_token", "bos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
            value = record.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                names[key] = value
    return names


def _convert(location: str, kept: Path | None) -> str:
    """Let transformers read what is not yet a tokenizer.json, and keep it as one."""
    import tempfile

    from transformers import AutoTokenizer

    folder, file = (location, None) if os.path.isdir(location) else os.path.split(location)
    try:
        kind = {"gguf_file": file} if file else {}
        fast = AutoTokenizer.from_pretrained(folder or ".", local_files_only=True, **kind)
        if not fast.is_fast:
            raise ValueError(f"{type(fast).__name__} has no fast form")
    except Exception as error:
        raise ModelError(
            f"tokenizer: {location}",
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            instead=["a folder with tokenizer.json", *(["pip install 'skimp[gguf]'"] if file else [])],
        ) from error
    target = kept if kept is not None else Path(tempfile.mkdtemp(prefix="skimp-tokenizer-"))
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    fast.save_pretrained(aside)
    if not target.exists() or not any(target.iterdir()):
        os.replace(aside, target)
    return str(target / "tokenizer.json")
