"""Preference pairs: a prompt with a chosen and a rejected answer, read and checked for the losses to come.

Three forms are read: texts (`prompt`, `chosen`, `rejected`); a prompt of turns with answers of turns, or of text; and
two whole conversations without a `prompt` field, which must be the same up to the last answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skimp.core.errors import DataError
from skimp.data.messages import RowError, conversation

if TYPE_CHECKING:
    from skimp.data.kinds import Fields
    from skimp.data.readers import Record

Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Prompt and answers, all as text or all as turns; `form` names how the row said it."""

    prompt: str | Turns
    chosen: str | Turns
    rejected: str | Turns
    form: str


@dataclass
class PairCounts:
    """Pairs by form, and rows left out by reason."""

    forms: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


def pair_of(record: Record, names: Fields, where: str) -> Pair:
    """A row as a pair.

    Raises:
        RowError: a side is missing, empty, of another form than the other, the same as the other, or answers another
            prompt.
    """
    for name in (names.chosen, names.rejected):
        if name not in record.fields:
            there = ", ".join(map(str, record.fields))
            raise RowError("field missing", f"{where}: the field '{name}'", f"fields there: {there}")
    sides = [record.fields[names.chosen], record.fields[names.rejected]]
    prompt = record.fields.get(names.prompt)
    if all(isinstance(side, str) for side in sides):
        if isinstance(prompt, list):
            turns = conversation(prompt, where, complete=False)
            chosen, rejected = ([{"role": "assistant", "content": side}] for side in sides)
            pair = Pair(turns, chosen, rejected, "turns and text")
        elif isinstance(prompt, str):
            pair = Pair(prompt, sides[0], sides[1], "text")
        else:
            raise RowError(
                "prompt missing", f"{where}: the prompt of a pair, in '{names.prompt}'",
                "none" if prompt is None else type(prompt).__name__, instead="data.fields.prompt=NAME of its field",
            )  # fmt: skip
    elif all(isinstance(side, list) for side in sides):
        pair = _of_turns(prompt, sides, where)
    else:
        kinds = " and ".join(type(side).__name__ for side in sides)
        raise RowError("sides of two forms", f"{where}: both answers as text, or both as turns", kinds)
    for name, side in zip((names.chosen, names.rejected), (pair.chosen, pair.rejected), strict=True):
        if not _words(side).strip():
            raise RowError(
                "answer empty", f"{where}: an answer in '{name}'", "nothing", "an empty answer teaches nothing"
            )
    if pair.chosen == pair.rejected:
        raise RowError("answers the same", f"{where}: two different answers", "one and the same", "it prefers neither")
    return pair


def _of_turns(prompt: Any, sides: list[Any], where: str) -> Pair:
    if prompt is not None and not isinstance(prompt, str):
        turns = conversation(prompt, where, complete=False)
        chosen, rejected = (conversation(side, where, answer=True) for side in sides)
        return Pair(turns, chosen, rejected, "turns")
    talks = [conversation(side, where) for side in sides]
    for talk in talks:
        if talk[-1]["role"] != "assistant":
            raise RowError(
                "answer missing", f"{where}: conversations that end with an answer", f"role {talk[-1]['role']}"
            )
    if talks[0][:-1] != talks[1][:-1]:
        at = next((i for i, (a, b) in enumerate(zip(*talks, strict=False)) if a != b), min(map(len, talks)))
        raise RowError(
            "answers to two prompts", f"{where}: two conversations that differ in their last answer only",
            f"they differ in turn {at + 1} already", "a preference is between answers to one prompt",
        )  # fmt: skip
    return Pair(talks[0][:-1], talks[0][-1:], talks[1][-1:], "conversations")


def _words(side: str | Turns) -> str:
    if isinstance(side, str):
        return side
    return "".join(turn["content"] + ("call" if "tool_calls" in turn else "") for turn in side)


def check_pairs(rows: Iterator[tuple[Record, str]], names: Fields, drop: bool) -> PairCounts:
    """Read every pair.

    Args:
        rows: each row with its file and row for messages.
        names: of the fields.
        drop: leave rows out that are no pairs, and count them.

    Raises:
        RowError: the first row that is no pair, without `drop`.
    """
    counts = PairCounts()
    for record, where in rows:
        try:
            form = pair_of(record, names, where).form
        except RowError as error:
            if not drop:
                raise
            counts.dropped[error.reason] = counts.dropped.get(error.reason, 0) + 1
            continue
        counts.forms[form] = counts.forms.get(form, 0) + 1
    return counts


def not_yet(source: str, counts: PairCounts, names: Fields) -> DataError:
    """What is said once all pairs are read: they are sound, and are not trained on yet."""
    number = sum(counts.forms.values())
    forms = ", ".join(f"{n:,} as {form}" for form, n in counts.forms.items())
    lost = "".join(f"; {n:,} left out: {why}" for why, n in counts.dropped.items())
    ways = []
    if "text" in counts.forms:
        ways.append(f"train on the better answers: data.format=prompt data.fields.completion={names.chosen}")
    if "conversations" in counts.forms:
        ways.append(f"train on the better answers: data.format=messages data.fields.messages={names.chosen}")
    return DataError(
        f"training on preference pairs: {source}",
        f"{number:,} pairs, read and checked: {forms or 'none'}{lost}",
        "this version trains on text, answers and conversations; losses over pairs come with a later one",
        ways or "rows of prompt and completion, or messages",
    )
