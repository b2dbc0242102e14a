"""`skimp plan --sweep seq=1k,4k batch=1..8`: what fits over a table, and the largest that does.

`batch` is the rows that go through the model at once here: with smaller micro-batches any number of rows fits a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skimp.core.errors import ModelError, RecipeError, did_you_mean

#: Cells of a table: each is a search of some seconds.
MOST_CELLS = 64
KEYS = ("seq", "batch")
#: Lengths are found to this many tokens.
SEQ_STEP = 64
EXAMPLE = "skimp plan --model llama-3-8b --gpu 24GB --sweep seq=1k,4k,16k batch=1..8"


@dataclass(frozen=True)
class Cell:
    """One run of the table; `peak_bytes` 0 and `why` where it cannot be planned."""

    seq: int
    batch: int
    fits: bool
    peak_bytes: int = 0
    seconds: float = 0.0
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dict(vars(self))


def parse(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The values of each key, ascending.

    Args:
        words: "seq=1k,4k" and "batch=1..8"; k is 1,024.

    Raises:
        RecipeError: an unknown key, no values, values below one, a range backwards, or too many cells.
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        if key not in KEYS or not equals:
            raise RecipeError(
                f"--sweep {word}", f"key '{key}'", "a sweep is over seq and batch", did_you_mean(key, KEYS)
            )
        if key in found:
            raise RecipeError(f"--sweep {word}", f"{key} twice", instead=EXAMPLE)
        found[key] = tuple(sorted({n for part in values.split(",") for n in _values(word, part)}))
    cells = 1
    for values_ in found.values():
        cells *= len(values_)
    if not found or cells > MOST_CELLS:
        raise RecipeError(
            f"--sweep {' '.join(words)}",
            f"{cells if found else 0} runs",
            f"each is a search of some seconds; at least one and at most {MOST_CELLS} are made",
            EXAMPLE,
        )
    return found


def _values(word: str, part: str) -> Iterator[int]:
    ends = [_number(word, end) for end in part.split("..")]
    if len(ends) > 2 or ends[0] > ends[-1] or ends[-1] - ends[0] >= 10_000:
        raise RecipeError(f"--sweep {word}", f"'{part}'", "a range goes up, from..to", EXAMPLE)
    yield from range(ends[0], ends[-1] + 1)


def _number(word: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)(k?)", text.strip().lower())
    number = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if number < 1:
        raise RecipeError(f"--sweep {word}", f"'{text}'", "values are whole numbers from 1 on; 4k is 4,096", EXAMPLE)
    return number


def words(seq: int, batch: int) -> tuple[str, ...]:
    """The overrides of one run: so many rows at once, and one optimizer step of them."""
    return (f"data.seq_len={seq}", f"train.batch_tokens={seq * batch}", f"exact.micro_batch={batch}")


def sweep(swept: dict[str, tuple[int, ...]], seq: int, batch: int, plan: Callable[..., Any]) -> list[Cell]:
    """All cells; what is not swept stays at `seq` and `batch`.

    Args:
        plan: overrides -> `Plan`.

    Raises:
        ModelError: every length lies beyond the model's positions.
    """
    cells: list[Cell] = []
    refused: ModelError | None = None
    for length in swept.get("seq", (seq,)):
        for rows in swept.get("batch", (batch,)):
            try:
                found = plan(*words(length, rows))
            except ModelError as error:
                if "seq_len" not in error.asked:
                    raise
                refused = error
                cells.append(Cell(length, rows, False, why=f"beyond {error.found}"))
            else:
                cells.append(Cell(length, rows, found.fits, found.peak_bytes, found.seconds))
    if refused is not None and all(cell.why for cell in cells):
        raise refused
    return cells


def largest(measure: Callable[[int], tuple[int, bool]], most: int, step: int = 1) -> int | None:
    """The largest multiple of `step` up to `most` that fits; None when not even the first does.

    Bytes grow almost in proportion, so each try is where a line through both sides of the bracket meets the budget;
    every other one halves it instead once that has not closed it in a few. Both sides of the boundary have been
    simulated when it returns: the answer fits, the next does not.

    Args:
        measure: value -> (bytes above the budget, below 0 where there is room; whether it fits).
    """
    top = most // step
    if top < 1:
        return None
    sizes: dict[int, int] = {}

    def fits(place: int) -> bool:
        sizes[place], found = measure(place * step)
        return found

    if not fits(1):
        return None
    good, bad = 1, 2
    while bad <= top and fits(bad):  # the answer is often far below the most there could be
        good, bad = bad, min(max(2 * bad, _met(sizes, good, bad)), top) if bad < top else top + 1
    if bad > top:
        return top * step
    for tries in range(top):
        if bad - good == 1:
            break
        middle = _met(sizes, good, bad) if tries < 4 or tries % 2 else (good + bad) // 2
        middle = min(max(middle, good + 1), bad - 1)
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good * step


def _met(sizes: Mapping[int, int], low: int, high: int) -> int:
    """Where the line through two sizes meets the budget; the middle where it is no line upwards."""
    rise = sizes[high] - sizes[low]
    return (low + high) // 2 if rise <= 0 else low - sizes[low] * (high - low) // rise
