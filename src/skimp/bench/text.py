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
from collections.abc import Iterator
from pathlib import Path

from skimp.bench.profiles import Profile

#: Folders of the library that are no library.
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "dist-packages"}
#: Shorter documents are noise.
SHORTEST = 80


def prepare(folder: Path, profile: Profile) -> str:
    """Write text.jsonl, tokenizer.json and config.json into `folder`, unless they are there; returns the text's
    SHA-256."""
    mark = folder / "text.sha256"
    if mark.is_file():
        return mark.read_text(encoding="utf-8").strip()
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    texts = list(documents(profile.code))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=profile.vocab, special_tokens=["<end>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(profile.config), encoding="utf-8")
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (folder / "text.jsonl").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    mark.write_text(digest, encoding="utf-8")  # last: without it a killed preparation begins anew
    return digest


def documents(code: bool) -> Iterator[str]:
    """The documents, in an order that is always the same."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue  # a file in another encoding, or one that is broken on purpose
        yield from _docstrings(tree)
        if code and len(source) >= SHORTEST:
            yield source


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= SHORTEST:
                yield text
