"""`skimp plan --sweep`, `--largest` and the file of `--frontier`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from skimp.core.errors import RecipeError, did_you_mean
from skimp.core.units import format_bytes

FORMS = (".svg", ".png", ".json")


def check_file(path: str) -> None:
    """Before anything is planned: a form that can be written, and matplotlib where it needs it.

    Raises:
        RecipeError: another form, or a folder that does not exist.
    """
    target = Path(path)
    if target.suffix not in FORMS:
        raise RecipeError(f"--frontier {path}", f"'{target.suffix}'", instead=[target.stem + form for form in FORMS])
    if not target.absolute().parent.is_dir():
        raise RecipeError(f"--frontier {path}", f"no folder {target.absolute().parent}")
    if target.suffix == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise RecipeError(f"--frontier {path}", "matplotlib is not installed", instead=target.stem + ".svg")


def draw(plan: Mapping[str, Any], path: str) -> None:
    """Write the frontier of `Plan.as_dict()`."""
    from skimp.report.frontier_picture import frontier_svg

    target = Path(path)
    if target.suffix == ".json":
        target.write_text(json.dumps(plan["frontier"], indent=2), encoding="utf-8")
    elif target.suffix == ".png":
        from skimp.report.png import frontier_png

        target.write_bytes(frontier_png(plan))
    else:
        target.write_text(frontier_svg(plan), encoding="utf-8")


def table(
    source: Any,
    words: list[str],
    swept: str | None,
    largest: str | None,
    *,
    seq: int | None,
    batch: int | None,
    gpu: str | None,
    memory: str | None,
    as_json: bool,
) -> int:
    """Print the table, or the largest; the exit code: 0 where something fits, 3 where nothing does.

    Raises:
        RecipeError: a sweep or a key that means nothing.
    """
    from skimp.core.units import parse_bytes
    from skimp.plan.make import make_plan
    from skimp.plan.places import places
    from skimp.plan.sweep import KEYS, parse, sweep
    from skimp.recipe import check_model, load_recipe, resolve_model

    asked = [word for word in words if word.partition("=")[0] in KEYS]
    words = [word for word in words if word not in asked]
    if swept is None and asked:
        raise RecipeError(f"skimp plan --largest … {asked[0]}", f"{asked[0]} without --sweep", instead="--seq, --batch")
    values = parse([*swept.split(), *asked]) if swept is not None else {}
    if largest is not None and (swept is not None or largest not in KEYS):
        why = did_you_mean(largest, KEYS) if swept is None else "one of --sweep and --largest"
        raise RecipeError(
            f"--largest {largest}", "not one of seq and batch" if swept is None else "a sweep", instead=why
        )
    first = load_recipe(source, words)
    model = resolve_model(first.model)
    bytes_ = None if memory is None else parse_bytes(memory, "memory")
    seq, batch = seq or first.data.seq_len, batch or 1
    known: dict[tuple[str, ...], Any] = {}
    where: Any = None

    def asked_for(*more: str) -> Any:
        nonlocal where
        recipe = load_recipe(source, [*words, *more])
        check_model(recipe, model)
        where = where or places(recipe, model.config, gpu, bytes_)
        return recipe

    def plan(*more: str) -> Any:
        if more not in known:
            recipe = asked_for(*more)
            known[more] = make_plan(recipe, model.config, label=model.name, offer=False, where=replace(where))
        return known[more]

    if largest is not None:
        from skimp.plan.least import least

        def smallest(*more: str) -> tuple[int, bool]:
            recipe = asked_for(*more)
            size, fits = least(recipe, model.config, replace(where))
            return size - where.device_budget, fits

        return _largest(largest, plan, smallest, lambda: where.device_budget, seq, batch, first, model, as_json)
    cells = sweep(values, seq, batch, plan)
    if as_json:
        print(json.dumps([cell.as_dict() for cell in cells], indent=2))
    else:
        _print(cells)
    return 0 if any(cell.fits for cell in cells) else 3


def _largest(
    key: str, plan: Any, smallest: Any, room: Any, seq: int, batch: int, recipe: Any, model: Any, as_json: bool
) -> int:
    from skimp.cli.console import console
    from skimp.plan.sweep import SEQ_STEP, largest, words

    def at(value: int) -> tuple[str, ...]:
        return words(value, batch) if key == "seq" else words(seq, value)

    extended = recipe.model.positions == "extend"
    positions = model.config.get("max_position_embeddings") or model.config.get("n_positions")
    most = 4096 if key == "batch" else 1 << 22 if extended or positions is None else positions
    step = SEQ_STEP if key == "seq" else 1
    found = largest(lambda value: smallest(*at(value)), most, step)
    budget = room()
    if as_json:
        print(json.dumps({"key": key, "largest": found, "most": most, "budget_bytes": budget}))
    elif found is None:
        console().print(f"no {key} fits {format_bytes(budget)}")
    else:
        of = plan(*at(found))
        beside = f"{batch} rows at once" if key == "batch" else f"{batch} rows of it at once"
        beside = f"rows of {seq} tokens at once" if key == "batch" else beside
        console().print(
            f"largest {key} in {format_bytes(budget)}: {found:,} ({beside}), {format_bytes(of.peak_bytes)}, "
            f"{of.exact.describe(of.blocks, of.rows)}" + ("; the most there can be" if found == most else "")
        )
    return 0 if found is not None else 3


def _print(cells: list[Any]) -> None:
    from skimp.cli.console import console
    from skimp.cli.show import short

    shown = Table(box=None, pad_edge=False)
    for name in ("seq", "rows at once", "", "peak", "a step"):
        shown.add_column(name, justify="right" if name else "left")
    for cell in cells:
        verdict = cell.why or ("fits" if cell.fits else "over")
        size, time = ("", "") if cell.why else (format_bytes(cell.peak_bytes), short(cell.seconds))
        shown.add_row(f"{cell.seq:,}", str(cell.batch), verdict, size, time)
    console().print(shown)
