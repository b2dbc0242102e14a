"""The three answers of `skimp init`, looked at before they are written: the model, the data, the memory."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from skimp.core.errors import DataError, ModelError, RecipeError, SkimpError
from skimp.core.units import format_bytes, parse_bytes

#: Rows of a data file that are looked at; enough to know their kind and their usual length.
LOOKED_AT = 200
#: Bytes of UTF-8 in one token of English and code, for an estimate that is called one.
BYTES_A_TOKEN = 4
#: An epoch of more steps than this is left for a second run; the first should end while one watches.
STEPS = 200
ROWS, SEQ_LEN = 4, 512


@dataclass
class Answer:
    """values: dotted key -> what is written; notes: dotted key -> why; said: what to tell the user."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    said: str = ""


def model(name: str) -> Answer:
    """What a model is, and whether its weights can be had.

    Raises:
        ModelError: nothing of that name, or no tokenizer to be had with it.
    """
    from skimp.recipe import resolve_model

    source = resolve_model(name)
    count = source.parameters
    found = Answer({"model": name}, {"model": f"{source.why[0].upper()}{source.why[1:]}."})
    found.said = f"{source.why}{f'; {count:,} parameters' if count else ''}"
    if source.weights is None and source.hub is None:
        found.values = {"model.name": name, "model.init": "scratch"}
        found.notes = {"model.init": "There are no weights to load, so it is trained from nothing."}
        found.said += "; there are no weights, so it is trained from scratch"
    if source.tokenizer is None and source.tokenizer_hub is None:
        raise ModelError(
            f"model '{name}'", "no tokenizer beside it", "text is cut into tokens by the model's own", ["smollm2-135m"]
        )
    positions = source.config.get("max_position_embeddings") or source.config.get("n_positions")
    if isinstance(positions, int) and positions < SEQ_LEN:
        found.values["data.seq_len"] = positions
        found.notes["data.seq_len"] = "As many as the model has positions."
    return found


def data(told: str, more: Sequence[str] = ()) -> Answer:
    """What the rows of a text source are, seen from the first of them.

    Args:
        told: the source, and behind it keys that say how its rows are read: `texts.jsonl data.field=body`.
        more: such keys that were given elsewhere, each a word of its own.

    Raises:
        DataError: no such file, damaged, or rows that say nothing to train on; names the key that would help.
    """
    from skimp.data.kinds import Fields, kind_of
    from skimp.data.readers import PLAIN, read_records
    from skimp.data.sources import find_sources
    from skimp.recipe.document import parse_value
    from skimp.recipe.load import override

    name, typed = told, re.findall(r"\s(data\.\S+=\S+)", told)
    for word in typed:
        name = name.replace(word, "")
    name, words = name.strip(), [*typed, *more]
    asked: dict[str, Any] = {}
    for word in words:
        override(asked, word)
    says = asked.get("data", {})
    fields = Fields(says.get("field", "text"), **says.get("fields", {}))
    source = find_sources([name], "data.train")[0]
    size = sum(os.path.getsize(f.path) for f in source.files if f.kind != "hub")
    found = Answer(
        {"data.train": name, **{word.partition("=")[0]: parse_value(word.partition("=")[2], word) for word in words}}
    )
    first = source.files[0]
    files = f"{len(source.files)} files, " if len(source.files) > 1 else ""
    if first.kind == "hub":
        found.said = "a data set of the Hub: its rows are looked at when it is planned"
        return found
    if first.kind in PLAIN:
        found.said = f"{files}plain text, {format_bytes(size)}"
        if first.kind != "pydoc" and len(source.files) < 20:
            _hold_nothing_out(found, f"of {_files(len(source.files))} none can be spared whole")
        return _length(found, size)
    rows = list(islice(read_records(first, "utf-8"), LOOKED_AT))
    if not rows:
        raise DataError(first.path, "no rows", instead="a file with at least one")
    kind = kind_of(says.get("format", "auto"), list(rows[0].fields), fields, f"{first.path}, row {rows[0].row}")
    if kind == "preference":
        raise DataError(
            f"{first.path}: rows to train on",
            "preference pairs (chosen and rejected)",
            "they are read and checked, and not trained on yet",
            "rows of text, of prompt and completion, or of messages",
        )
    what = {"text": "rows of text", "prompt": "prompts with completions", "messages": "conversations"}[kind]
    many = "at least " if len(rows) == LOOKED_AT or len(source.files) > 1 else ""
    found.said = f"{files}{what}, {many}{len(rows)} rows, {format_bytes(size)}"
    if len(rows) < 20 and not many:
        _hold_nothing_out(found, f"of {len(rows)} rows none can be spared")
    return found if first.compression or first.kind == "parquet" else _length(found, size)


def _hold_nothing_out(found: Answer, why: str) -> None:
    """No validation set, unless one was named."""
    if "data.validation" not in found.values:
        found.values["data.validation"] = None
        found.notes["data.validation"] = f"Off: {why}."


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _length(found: Answer, size: int) -> Answer:
    """How long the run is: one pass, or as many steps as end while one watches."""
    steps = max(1, size // BYTES_A_TOKEN // (ROWS * SEQ_LEN))
    if steps <= STEPS:
        found.values["train.epochs"] = 1
        found.notes["train.epochs"] = f"One pass is about {steps} steps."
    else:
        found.values["train.steps"] = STEPS
        share = STEPS / steps
        found.notes["train.steps"] = f"About {share:.1%} of one pass over the text; `epochs: 1` reads all of it."
    return found


def memory(text: str) -> Answer:
    """A budget for the whole process.

    Raises:
        SkimpError: not a size, or less than the process takes before its first tensor.
    """
    size = parse_bytes(text.strip(), "budget")
    if size < 10**9 // 2:
        raise RecipeError(
            f"budget: {text}",
            format_bytes(size),
            "Python and torch alone take about 0.4 GB before the first tensor",
            "budget: 1GB or more",
        )
    here = room()
    found = Answer({"budget": text.strip()})
    if here is not None:
        found.notes["budget"] = f"{format_bytes(here)} were free on this machine when this was written."
    found.said = f"{format_bytes(size)} for the whole process"
    if here is not None and size > here:
        found.said += f"; {format_bytes(here)} are free now, so it plans here and trains on a larger machine"
    return found


def room() -> int | None:
    """Bytes a process may take on this machine now; None where it does not tell."""
    from skimp.recipe import host_budget

    try:
        return host_budget().bytes
    except SkimpError:
        return None


def usual_memory() -> str:
    """Four fifths of what is free, rounded down to half a GB: the rest stays for what else runs."""
    here = room()
    halves = int((here or 4 * 10**9) * 0.8 / (5 * 10**8))
    return f"{max(halves, 2) / 2:g}GB"


def usual_data(folder: Path) -> str:
    """The first file here of a kind that holds rows and little else, or the text that ships with Python."""
    from skimp.data.sources import SUFFIXES

    rows = tuple(s for s in SUFFIXES if s.split(".")[1] not in ("txt", "json"))  # many a .json is no data
    found = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name.endswith(rows))
    return found[0] if found else "pydoc"
