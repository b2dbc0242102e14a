"""The benchmark's text, tokenizer and model folder, made from what Python itself ships: nothing is downloaded.

Real English prose about one subject: the language reference (`pydoc_data.topics`) and the docstrings of the standard
library, each documentation string one document; larger profiles read the library's source files too. The bytes
depend on Python's version alone, so their SHA-256 goes with every result.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from skimp.bench.profiles import Profile

#: Folders of the library that are no library.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "dist-packages"}
#: Shorter documents are noise.
SHORTEST = 80


def prepare(folder: Path, profile: Profile) -> str:
    """Text, tokenizer and config of the pre-training benchmark; returns the text's SHA-256."""
    return write_model(folder, documents(profile.code), profile.vocab, profile.config)


def write_model(folder: Path, texts: Iterable[str], vocab: int, config: dict[str, Any]) -> str:
    """Write text.jsonl, a tokenizer trained on it and config.json into `folder`, unless they are there; returns the
    text's SHA-256."""
    mark = folder / "text.sha256"
    if mark.is_file():
        return mark.read_text(encoding="utf-8").strip()
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = list(texts)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocab, special_tokens=["<end>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "text.jsonl").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    mark.write_text(digest, encoding="utf-8")  # last: without it a killed preparation begins anew
    return digest


def cut(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, whole, until so many characters are reached."""
    for text in texts:
        if characters <= 0:
            return
        yield text
        characters -= len(text)


def documents(code: bool) -> Iterator[str]:
    """The documents, in an order that is always the same."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for _, source, tree in parsed_files():
        yield from _docstrings(tree)
        if code and len(source) >= SHORTEST:
            yield source


def parsed_files(only: Collection[str] = ()) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path below the library, source, tree) of every file of the standard library, in an order that is always the
    same; a file in another encoding, or one that is broken on purpose, is left out.

    Args:
        only: modules to read; none: all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts) or (only and module_of(relative) not in only):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        yield relative, source, tree


def module_of(relative: Path) -> str:
    """The library's module that a file belongs to."""
    return relative.parts[0].removesuffix(".py")


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= SHORTEST:
                yield text
