"""Word problems by rule: one or two steps of addition and subtraction, a worked solution, "####" and the number.

The form is that of GSM8K (Cobbe et al., arXiv 2110.14168, section 2): the working comes first, the number after
"####" is what counts. Numbers of a problem are drawn from pairs that belong to one part alone (train, dev or test), so
no test problem can be answered from a training problem's numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import islice

NAMES = ("Ann", "Ben", "Mia", "Tom", "Eva", "Max", "Lea", "Jon")
THINGS = ("apples", "books", "coins", "cards", "shells", "stamps", "pens", "eggs")
MORE = ("finds {n} more", "buys {n} more", "gets {n} from a friend")
LESS = ("loses {n}", "gives {n} away", "sells {n}")
ASKS = ("How many {things} does {name} have now?", "How many {things} are left with {name}?")


def part_of(words: str, dev: int = 10, test: int = 20) -> str:
    """Which part a latent factor belongs to, by hash: `dev` and `test` are percent."""
    place = int.from_bytes(hashlib.sha256(words.encode()).digest()[:4], "big") % 100
    return "test" if place < test else "dev" if place < test + dev else "train"


def problems(part: str, largest: int, deepest: int, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, answer) pairs of a part.

    Args:
        part: train, dev or test.
        largest: number in a problem, results included.
        deepest: steps of a problem at most.
    """
    draw = random.Random(f"maths {part} {largest} {deepest} {seed}")
    while True:
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        have = draw.randint(1, largest)
        story, working = f"{name} has {have} {thing}", []
        for step in range(draw.randint(1, deepest)):
            grows = have < largest and (have < 1 or draw.random() < 0.5)
            other = draw.randint(1, largest - have) if grows else draw.randint(1, have)
            if part_of(f"{have} {'+' if grows else '-'} {other}") != part:
                break
            then = have + other if grows else have - other
            story += f"{' and' if step == 0 else ', then'} {draw.choice(MORE if grows else LESS).format(n=other)}"
            working.append(f"{have} {'+' if grows else '-'} {other} = {then}")
            have = then
        else:
            ask = draw.choice(ASKS).format(name=name, things=thing)
            yield f"Question: {story}. {ask}\nAnswer:", " " + "\n".join([*working, f"#### {have}"])


def stories(largest: int, deepest: int, count: int, seed: int) -> Iterator[str]:
    """Documents of training stories and their sums for pre-training, four a document: no question, no answer's form."""
    told = problems("train", largest, deepest, seed)
    for _ in range(count // 4):
        lines = []
        for question, answer in islice(told, 4):
            story = question.removeprefix("Question: ").partition(". ")[0]
            lines.append(f"{story}: {answer.strip().rpartition(chr(10))[0].replace(chr(10), ', ')}.")
        yield "\n".join(lines)


def facts(largest: int, rounds: int, seed: int) -> Iterator[str]:
    """Documents of bare sums for pre-training: every fact of the range, `rounds` times, ten a document, shuffled,
    each with its result once more behind "####", as an answer ends."""
    draw = random.Random(f"facts {largest} {seed}")
    sums = [f"{a} + {b} = {a + b}" for a in range(largest + 1) for b in range(largest + 1 - a)]
    sums += [f"{a} - {b} = {a - b}" for a in range(largest + 1) for b in range(a + 1)]
    for _ in range(rounds):
        draw.shuffle(sums)
        for start in range(0, len(sums), 10):
            group = sums[start : start + 10]
            yield "Sums: " + "\n".join(f"{line}\n#### {line.split()[-1]}" for line in group)
