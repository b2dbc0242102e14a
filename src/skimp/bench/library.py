"""What Python's own standard library is read for: code completion pairs, and sentences with the module they document.

Nothing is downloaded. What is found depends on Python's version alone, so the SHA-256 of the items goes with results.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from skimp.bench.maths import part_of
from skimp.bench.text import cut, module_of, parsed_files

#: An assignment whose right side is one word: what human-eval's prompts are to functions, in one line.
SIMPLE = re.compile(r"self\.(\w+) = (\w+|\[\]|\{\}|\(\)|''|\"\")$")
LONGEST = 110
#: Modules with enough documented members, each about as often as the others: the majority answer is right in an eighth.
MODULES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "tkinter", "unittest", "xml")
EACH = 190


@lru_cache(maxsize=1)
def found() -> tuple[dict[tuple[str, str], str], dict[str, set[str]]]:
    """All of it in one reading: (prompt, right side) -> part, and first sentence -> modules."""
    pairs: dict[tuple[str, str], str] = {}
    sentences: dict[str, set[str]] = {}
    for relative, source, tree in parsed_files():
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                for pair in _assignments(lines, node):
                    pairs.setdefault(pair, part_of(module_of(relative)))
            if (
                isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and module_of(relative) in MODULES
            ):
                first = sentence(ast.get_docstring(node) or "")
                if 20 <= len(first) <= LONGEST:
                    sentences.setdefault(first, set()).add(module_of(relative))
    return pairs, sentences


def _assignments(lines: list[str], node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    header = lines[node.lineno - 1].strip()
    if not header.endswith(":") or len(header) > LONGEST:
        return
    for at in range(node.lineno, node.end_lineno or node.lineno):
        match = SIMPLE.match(lines[at].strip())
        if match is not None:
            before = lines[at - 1].strip() if at > node.lineno else ""
            context = f"    {before}\n" if before and len(before) <= LONGEST else ""
            yield f"{header}\n{context}    self.{match[1]} =", match[2]


def completions() -> list[tuple[str, str, str]]:
    """(part, code up to a right side, the right side), each once, in an order that is always the same.

    The header of the method and the line before are the context. A module's pairs are in one part alone; a prompt with
    two right sides is left out, for one of them would be marked wrong.
    """
    pairs, _ = found()
    sides = Counter(prompt for prompt, _ in pairs)
    return [(part, prompt, f" {side}") for (prompt, side), part in pairs.items() if sides[prompt] == 1]


def questions() -> list[tuple[str, str, str]]:
    """(part, instruction with the first sentence of a docstring, its module); a sentence is in one part alone."""
    _, sentences = found()
    single = [(first, next(iter(names))) for first, names in sorted(sentences.items()) if len(names) == 1]
    random.Random("questions").shuffle(single)
    kept: Counter[str] = Counter()
    out = []
    for first, module in single:
        kept[module] += 1
        if kept[module] <= EACH:
            prompt = f"Name the module that this documents.\nSentence: {first}\nModule:"
            out.append((part_of(first), prompt, f" {module}"))
    return out


def described(rounds: int) -> Iterator[str]:
    """The training part's modules and sentences the other way round, for pre-training: names must have been read."""
    known = [(prompt.split("\n")[1], answer) for part, prompt, answer in questions() if part == "train"]
    for turn in range(rounds):
        random.Random(f"described {turn}").shuffle(known)
        for start in range(0, len(known), 4):
            yield "\n".join(f"Module:{module}\n{first}" for first, module in known[start : start + 4])


def sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) ", paragraph)[0]


def code(characters: int) -> Iterator[str]:
    """Source of modules whose pairs are for training, until so many characters: no dev or test pair is in it."""
    return cut((s for relative, s, _ in parsed_files() if part_of(module_of(relative)) == "train"), characters)
