"""The three small tasks that methods are fine-tuned on, as rows of prompt and completion in three disjoint parts.

    maths   word problems by rule (`maths`); the last number after "####" counts
    code    one-word right sides from the standard library (`library.completions`); the first line counts
    docs    which module a sentence documents (`library.questions`); the first line counts

One model is trained on all three at once. Each task says what a guess reaches: its floor is the share of the answer
that is most frequent in training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skimp.bench import library, maths
from skimp.bench.scorers import exact, number

PARTS = ("train", "dev", "test")
#: Task -> how an answer is marked against the right one.
MARKS: dict[str, Callable[[str, str], bool]] = {"maths": number, "code": exact, "docs": exact}


@dataclass(frozen=True)
class Sizes:
    """Items of each task by part, and of word problems the largest number and the most steps. Fewer where the library
    has no more."""

    train: int
    dev: int
    test: int
    largest: int
    deepest: int = 2


@dataclass(frozen=True)
class Item:
    """One question and its right answer, which begins with the space that stands before it."""

    task: str
    prompt: str
    completion: str


def items(part: str, sizes: Sizes) -> list[Item]:
    """The items of a part, tasks in turn; the same for the same sizes and library.

    Word problems are drawn without repetition inside and across parts (`maths.part_of`).
    """
    wanted = getattr(sizes, part)
    problems = maths.problems(part, sizes.largest, sizes.deepest, 0)
    # A small range has few different problems: what is repeated is skipped, for a while.
    drawn = dict(islice(problems, 4 * wanted))
    of: dict[str, Iterable[tuple[str, str]]] = {"maths": drawn.items()}
    for task, pairs in (("code", library.completions()), ("docs", library.questions())):
        of[task] = [(prompt, answer) for where, prompt, answer in pairs if where == part]
    found = []
    for task, pairs_ in of.items():
        listed = list(pairs_)
        random.Random(f"{task} {part}").shuffle(listed)
        found += [Item(task, prompt, answer) for prompt, answer in listed[:wanted]]
    return found


def write(folder: Path, sizes: Sizes) -> str:
    """train.jsonl, dev.jsonl, test.jsonl into `folder`, unless they are there; returns the SHA-256 of all items."""
    mark = folder / "items.sha256"
    if not mark.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        for part in PARTS:
            lines = "".join(json.dumps(asdict(item)) + "\n" for item in items(part, sizes))
            (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
            digest.update(lines.encode())
        mark.write_text(digest.hexdigest(), encoding="utf-8")  # last: a killed preparation begins anew
    return mark.read_text(encoding="utf-8").strip()


def read(path: Path) -> list[Item]:
    """Items of a file that `write` wrote."""
    return [Item(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def marked(asked: list[Item], answers: list[str]) -> dict[str, tuple[int, int]]:
    """Task -> (right, asked)."""
    found: dict[str, tuple[int, int]] = {}
    for item, answer in zip(asked, answers, strict=True):
        right, of = found.get(item.task, (0, 0))
        found[item.task] = (right + MARKS[item.task](answer, item.completion), of + 1)
    return found


def floors(folder: Path) -> dict[str, float]:
    """Task -> share of test items that the most frequent final answer of training gets right."""
    train, test = read(folder / "train.jsonl"), read(folder / "test.jsonl")
    out = {}
    for task in MARKS:
        guess = Counter(final(item) for item in train if item.task == task).most_common(1)[0][0]
        own = [item for item in test if item.task == task]
        out[task] = sum(MARKS[task](guess, item.completion) for item in own) / len(own)
    return out


def final(item: Item) -> str:
    """The part of the right answer that counts."""
    return item.completion[item.completion.find("####") :] if "####" in item.completion else item.completion


def facts_of(folder: Path) -> dict[str, Any]:
    """Items by part and task, for the table's foot."""
    return {part: dict(Counter(item.task for item in read(folder / f"{part}.jsonl"))) for part in PARTS}
