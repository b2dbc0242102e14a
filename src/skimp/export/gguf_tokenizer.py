"""A tokenizer in GGUF's terms: tokens, their types, merges, special ids, the chat template.

A tokenizer that came from a GGUF goes back as it was, key by key. Any other must be a byte-level BPE whose rule for
splitting text llama.cpp knows; that rule is found in tokenizer.json and never guessed: a wrong one gives other tokens
for the same text, silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skimp.core.errors import ModelError
from skimp.run.words import Words

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5

#: The regular expressions of `Split` pre-tokenizers -> llama.cpp's name of the same rule.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}


def tokenizer_fields(location: Path, words: Words, vocabulary: int, pre: str | None = None) -> dict[str, Any]:
    """The `tokenizer.*` metadata.

    Args:
        location: where the model's tokenizer is; a GGUF's fields are copied.
        words: the loaded tokenizer.
        vocabulary: rows of the embedding; rows beyond the tokenizer get unused names.
        pre: llama.cpp's name of the splitting rule, instead of finding it.

    Raises:
        ModelError: no byte-level BPE, or a splitting rule that is not known.
    """
    if location.suffix == ".gguf":
        return _copied(location)
    described = json.loads((words.folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or not _byte_level(described):
        raise ModelError(
            f"--to gguf: the tokenizer in {words.folder}",
            f"a {model.get('type')} tokenizer" + (" with byte fallback" if model.get("byte_fallback") else ""),
            "byte-level BPE is written here; SentencePiece models need their scores, which tokenizer.json lacks",
            ["--to merged, then llama.cpp's own converter", "start from a GGUF: its tokenizer is copied"],
        )
    tokens, types = _tokens(described, vocabulary)
    special = words.tokenizer.special
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre or splitting_rule(described),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
        "tokenizer.ggml.eos_token_id": words.tokenizer.end,
        "tokenizer.ggml.add_bos_token": words.tokenizer.begin is not None,
        "tokenizer.ggml.add_space_prefix": False,
    }
    for key, name in (("bos", "bos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        number = words.tokenizer.encode.token_to_id(special[name]) if name in special else None
        if number is not None:
            fields[f"tokenizer.ggml.{key}_token_id"] = number
    if words.tokenizer.template:
        fields["tokenizer.chat_template"] = words.tokenizer.template
    return fields


def splitting_rule(described: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json splits text before merging.

    Raises:
        ModelError: a rule that is not known here; says which it is.
    """
    parts = _parts(described.get("pre_tokenizer"))
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        known = SPLITS.get(parts[0].get("pattern", {}).get("Regex", ""))
        if known is not None:
            return known
    shown = json.dumps(described.get("pre_tokenizer"), ensure_ascii=False)
    raise ModelError(
        "--to gguf: how the tokenizer splits text",
        shown if len(shown) < 400 else shown[:400] + " …",
        "it is none of the rules known here: gpt-2, smollm, llama-bpe, qwen2",
        "--pre NAME, llama.cpp's name of it, if you know that it is the same rule",
    )


def _parts(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    if node is None:
        return []
    return list(node["pretokenizers"]) if node.get("type") == "Sequence" else [node]


def _byte_level(described: dict[str, Any]) -> bool:
    return any(part.get("type") == "ByteLevel" for part in _parts(described.get("pre_tokenizer")))


def _tokens(described: dict[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Names and types by id; added tokens as their text, rows without a token as unused ones."""
    tokens = [f"[PAD{i}]" for i in range(vocabulary)]
    types = [UNUSED] * vocabulary
    for token, number in described["model"]["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in described.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    return tokens, types


def _copied(location: Path) -> dict[str, Any]:
    """Every tokenizer field of a GGUF, as it is."""
    import gguf

    reader: Any = gguf.GGUFReader(str(location))
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}
