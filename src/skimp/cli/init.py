"""`skimp init`: three questions, and a recipe that runs as it stands, every key of it explained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skimp.cli import complete

if TYPE_CHECKING:
    from skimp.cli.answers import Answer

#: Written in this order; what an answer settles replaces its value here.
START: dict[str, Any] = {
    "model": None,
    "precision": "fp32",
    "data.train": None,
    "data.validation": 0.05,
    "data.seq_len": 512,
    "data.packing": True,
    "budget": None,
    "train.steps": None,
    "train.batch_tokens": None,
    "train.lr": 2e-5,
    "train.schedule": "cosine",
    "train.warmup": 0.05,
    "train.clip": 1.0,
    "train.seed": 0,
    "optimizer": "adamw",
    "eval.at_start": True,
    "eval.at_end": True,
    "eval.tokens": 4096,
    "checkpoint.every": None,
    "checkpoint.keep": 2,
    "exact.micro_batch": None,
    "exact.recompute": None,
    "exact.loss_chunk": None,
    "exact.in_backward": None,
    "output": None,
}


def command(
    file: Annotated[Path, typer.Argument(help="The recipe to write.")] = Path("recipe.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value to write too.", autocompletion=complete.overrides)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Preset, Hub id, folder or GGUF.", autocompletion=complete.models)
    ] = None,
    data: Annotated[str | None, typer.Option(help="File, folder, glob, Hub data set, or pydoc.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory of the run, such as 2GB.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: the usual for all that is not given.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Write every key there is, not only the usual ones.")
    ] = False,
) -> None:
    """Ask which model, which data and how much memory; write a recipe that runs, every key explained."""
    from skimp.cli import answers
    from skimp.core.errors import RecipeError

    refuse_to_overwrite(file)
    if not yes and not sys.stdin.isatty() and None in (model, data, memory):
        raise RecipeError(
            "skimp init",
            "no terminal to ask on",
            instead=[f"skimp init {file} --yes", f"skimp init {file} --model smollm2-135m --data pydoc --memory 2GB"],
        )
    of_data = [w for w in overrides or () if w.startswith("data.") and not w.startswith("data.train=")]
    look_at_data = partial(answers.data, more=of_data)
    asked = (
        ("Which model? A preset, a Hub id, a folder or a .gguf file", model, "smollm2-135m", answers.model),
        ("Which data? A file, folder or glob of text, or pydoc", data, answers.usual_data(Path.cwd()), look_at_data),
        ("How much memory may it use, all in all?", memory, answers.usual_memory(), answers.memory),
    )
    values, notes = dict(START), dict[str, str]()
    for question, given, usual, look in asked:
        answer = ask(question, given if given is not None or not yes else usual, usual, look)
        values.update(answer.values)
        notes.update(answer.notes)
    text = recipe_text(file, values, notes, list(overrides or []), everything)
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}\n  skimp plan {file}     # will it fit, and how\n  skimp train {file}")
    if not yes and sys.stdin.isatty() and typer.confirm("Plan it now?", default=True):
        plan_it(file)


def ask(question: str, given: str | None, usual: str, look: Callable[[str], Answer]) -> Answer:
    """An answer that has been looked at; a wrong one is asked again, or raised where nobody can be asked."""
    from skimp.core.errors import SkimpError

    if given is not None:
        answer = look(given)
        print(f"{given}: {answer.said}")
        return answer
    while True:
        told = typer.prompt(question, default=usual).strip()
        try:
            answer = look(told)
        except SkimpError as error:
            print(error.message(), file=sys.stderr)
            continue
        print(f"  {answer.said}")
        return answer


def recipe_text(
    file: Path, values: dict[str, Any], notes: dict[str, str], overrides: list[str], everything: bool
) -> str:
    """The YAML of a recipe, read back before it is written.

    Raises:
        RecipeError: the answers and overrides do not make a recipe.
    """
    import yaml

    from skimp.recipe import load_recipe
    from skimp.recipe.load import override
    from skimp.recipe.written import written

    values = dict(values)
    for word in overrides:  # before what follows from the answers is settled: an override is an answer too
        key, value = override({}, word)
        if key in ("train.steps", "train.epochs") and value is not None:
            values.pop("train.epochs", None)
            values["train.steps"] = None
        values[key] = value
    values = settled(file, values)
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inside = nested
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = value
    for text in overrides:
        override(nested, text)
    described = load_recipe(nested)
    heading = [
        f"{file.name}, written by `skimp init`. Any key can be changed here, or on the command line:",
        f"skimp train {file} train.lr=1e-5",
    ]
    text = written(described.as_dict() if everything else nested, notes, heading)
    if load_recipe(yaml.safe_load(text)) != described:
        raise RuntimeError("the recipe does not read back as it was meant")
    return text


def settled(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What follows from the answers: tokens of a step, the run's folder, nothing to evaluate on."""
    values = dict(values)
    if "model.name" in values:
        del values["model"]
        values = {"model.name": values.pop("model.name"), "model.init": values.pop("model.init"), **values}
    if values["data.validation"] is None:
        values = {key: value for key, value in values.items() if not key.startswith("eval.")} | {"eval": None}
    if "train.epochs" in values:
        epochs = values.pop("train.epochs")
        values = {("train.epochs" if k == "train.steps" else k): v for k, v in values.items()}
        values["train.epochs"] = epochs
    elif values["train.steps"] is None:
        values["train.steps"] = 100
    values["train.batch_tokens"] = 4 * values["data.seq_len"]
    values["output"] = str(free(Path("runs") / file.stem))
    # The keys of one section side by side, sections in the order of START.
    tops = list(dict.fromkeys(key.partition(".")[0] for key in START))
    return dict(sorted(values.items(), key=lambda item: tops.index(item[0].partition(".")[0])))


def free(path: Path) -> Path:
    """The path, or the first of name-2, name-3 … that does not exist."""
    number, found = 2, path
    while found.exists():
        found, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return found


def refuse_to_overwrite(file: Path) -> None:
    """Raises RecipeError where something is in the way, or the folder is missing."""
    from skimp.core.errors import RecipeError

    if "=" in file.name:
        raise RecipeError(
            f"skimp init {file}", "an override where a file's name is meant", instead=f"skimp init recipe.yaml {file}"
        )
    if file.exists():
        raise RecipeError(
            f"skimp init {file}", "it exists", "nothing of yours is overwritten", f"skimp init {free(file)}"
        )
    if not file.absolute().parent.is_dir():
        raise RecipeError(f"skimp init {file}", f"no folder {file.parent}", instead=f"mkdir -p {file.parent}")


def plan_it(file: Path) -> None:
    """The plan of the recipe just written, as `skimp plan` shows it."""
    from skimp.api import plan as make
    from skimp.cli.console import console
    from skimp.cli.show import print_plan
    from skimp.core.memory.process import set_malloc_policy

    set_malloc_policy()
    found = make(str(file))
    print_plan(found, console())
    sys.exit(0 if found.fits else 3)
