"""`skimp train`: plan, train exactly that, and say what was planned against what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a run's folder with --resume.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides of any recipe key.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
    budget: Annotated[str | None, typer.Option(help="Most memory, such as 2GB (short for budget=2GB).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (short for train.steps=N).")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run (short for output=…).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the closing table.")] = False,
) -> None:
    """Train a recipe within its budget, resumable to the bit."""
    from skimp.core.memory.process import set_malloc_policy

    set_malloc_policy()
    from rich.console import Console

    from skimp.cli.closing import print_closing
    from skimp.cli.screen import Screen
    from skimp.cli.show import print_plan

    words = list(overrides or [])
    for key, value in (("budget", budget), ("train.steps", steps), ("output", output)):
        if value is not None:
            words.append(f"{key}={value}")
    console = Console()
    described, resuming = read(recipe, words, resume)
    from skimp.api import train_recipe

    with Screen(console, described, quiet) as screen:
        outcome = train_recipe(described, resume=resuming, voice=screen, told=lambda plan: print_plan(plan, console))
    print_closing(outcome, console)
    if outcome.stopped in ("SIGINT", "SIGTERM"):
        again = f"skimp train {outcome.folder} --resume"
        console.print(f"stopped by {outcome.stopped} at a step boundary; continue with:\n  {again}")
        sys.exit(130 if outcome.stopped == "SIGINT" else 143)


def read(recipe: str, words: list[str], resume: bool) -> tuple[Any, bool]:
    """The recipe of a file, or the stored one of a run's folder; a folder means resume.

    A stored recipe with overrides is checked against what may change between a run and its resumption.

    Raises:
        RecipeError: no such file, or a folder without --resume.
        CheckpointError: an override changes what the run is.
    """
    from skimp.core.errors import RecipeError
    from skimp.recipe import load_recipe, may_change_on_resume

    path = Path(recipe)
    if not path.is_dir():
        described = load_recipe(recipe, words)
        stored = Path(described.output) / "recipe.json"
        if resume and stored.is_file():
            _said(may_change_on_resume(load_recipe(json.loads(stored.read_text())), described))
        return described, resume
    stored = path / "recipe.json"
    if not stored.is_file():
        raise RecipeError(
            f"a run in {path}", "no recipe.json", "a run's folder holds the recipe it was started with",
            "skimp train RECIPE.yaml",
        )
    if not resume:
        raise RecipeError(
            f"skimp train {path}", "the folder of a run", "it has begun already", f"skimp train {path} --resume"
        )
    old = load_recipe(json.loads(stored.read_text(encoding="utf-8")))
    new = load_recipe(json.loads(stored.read_text(encoding="utf-8")), [*words, f"output={json.dumps(str(path))}"])
    _said(may_change_on_resume(old, new))
    return new, True


def _said(sentences: list[str]) -> None:
    for sentence in sentences:
        print(sentence)
