"""What Python's own standard library is read for: code completion pairs, and sentences with the module they document.

Nothing is downloaded. What is found depends on Python's version alone, so the SHA-256 of the items goes with results.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from skimp.bench.maths import part_of
from skimp.bench.text import cut, parsed_files

#: An assignment whose right side is one word: what human-eval's prompts are to functions, in one line.
SIMPLE = re.compile(r"self\.(\w+) = (\w+|\[\]|\{\}|\(\)|''|\"\")$")
LONGEST = 110
#: Modules with enough documented members, each about as often as the others: the majority answer is right in an eighth.
MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
EACH = 190


def top(relative: Path) -> str:
    """The library's module that a file belongs to."""
    return relative.parts[0].removesuffix(".py")


@lru_cache(maxsize=1)
def completions() -> tuple[tuple[str, str, str], ...]:
    """(part, code up to a right side, the right side), each once, in an order that is always the same.

    The header of the method and the line before are the context. A module's pairs are in one part alone.
    """
    found: dict[tuple[str, str], str] = {}
    for relative, source, tree in parsed_files():
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            header = lines[node.lineno - 1].strip()
            for at in range(node.lineno, node.end_lineno or node.lineno):
                match = SIMPLE.match(lines[at].strip())
                if match is None or not header.endswith(":") or len(header) > LONGEST:
                    continue
                before = lines[at - 1].strip() if at > node.lineno else ""
                context = f"    {before}\n" if before and len(before) <= LONGEST else ""
                prompt = f"{header}\n{context}    self.{match[1]} ="
                found.setdefault((prompt, match[2]), part_of(top(relative)))
    # A prompt with two right sides would be marked wrong for one of them.
    sides: dict[str, int] = {}
    for prompt, _ in found:
        sides[prompt] = sides.get(prompt, 0) + 1
    return tuple((part, prompt, f" {side}") for (prompt, side), part in found.items() if sides[prompt] == 1)


@lru_cache(maxsize=1)
def questions() -> tuple[tuple[str, str, str], ...]:
    """(part, instruction with the first sentence of a docstring, its module); a sentence is in one part alone."""
    found: dict[str, set[str]] = {}
    for relative, _, tree in parsed_files():
        if top(relative) not in MODULES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                first = sentence(ast.get_docstring(node) or "")
                if 20 <= len(first) <= LONGEST:
                    found.setdefault(first, set()).add(top(relative))
    single = [(first, next(iter(names))) for first, names in sorted(found.items()) if len(names) == 1]
    random.Random("questions").shuffle(single)
    kept: dict[str, int] = {}
    out = []
    for first, module in single:
        kept[module] = kept.get(module, 0) + 1
        if kept[module] <= EACH:
            prompt = f"Instruction: name the module that this sentence documents.\nSentence: {first}\nModule:"
            out.append((part_of(first), prompt, f" {module}"))
    return tuple(out)


def sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0]


def code(characters: int) -> Iterator[str]:
    """Source of modules whose pairs are for training, until so many characters: no dev or test pair is in it."""
    return cut((s for relative, s, _ in parsed_files() if part_of(top(relative)) == "train"), characters)
