"""`skimp train`: plan, train exactly that, and say what was planned against what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skimp.cli import complete


def command(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, or a run's folder with --resume.", autocompletion=complete.recipes)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value overrides of any recipe key.", autocompletion=complete.overrides),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
    budget: Annotated[str | None, typer.Option(help="Most memory, such as 2GB (short for budget=2GB).")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps (short for train.steps=N).")] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run (short for output=…).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Neither plan nor progress, only the end.")] = False,
) -> None:
    """Train a recipe within its budget, resumable to the bit."""
    from skimp.core.lean import stay_lean
    from skimp.core.memory.process import set_malloc_policy

    stay_lean()
    set_malloc_policy()
    from skimp.cli.closing import print_closing
    from skimp.cli.console import console
    from skimp.cli.screen import Screen

    words = list(overrides or [])
    for key, value in (("budget", budget), ("train.steps", steps), ("output", output)):
        if value is not None:
            words.append(f"{key}={json.dumps(value)}")
    described = read(recipe, words, resume)
    from skimp.api import train_recipe

    screen = console()
    try:
        with Screen(screen, described, quiet) as voice:
            outcome = train_recipe(described, resume=resume, voice=voice)
    except KeyboardInterrupt:
        # Before the first step, or a second Ctrl-C, which has said what is kept.
        print("skimp: interrupted", file=sys.stderr)
        sys.exit(130)
    if outcome.summary["steps"] == 0:
        screen.print(f"stopped by {outcome.stopped} before the first step; nothing is kept", soft_wrap=True)
    else:
        print_closing(outcome, screen)
    if outcome.stopped in ("SIGINT", "SIGTERM"):
        sys.exit(130 if outcome.stopped == "SIGINT" else 143)


def read(recipe: str, words: list[str], resume: bool) -> Any:
    """The recipe of a file, or the stored one of a run's folder, with overrides.

    Raises:
        RecipeError: no such file, a folder without --resume, or a folder that is no run.
        CheckpointError: the stored recipe is damaged.
    """
    from skimp.api import stored_recipe
    from skimp.core.errors import RecipeError
    from skimp.recipe import load_recipe

    path = Path(recipe)
    if not path.is_dir():
        return load_recipe(recipe, words)
    stored = path / "recipe.json"
    if not stored.is_file():
        raise RecipeError(
            f"a run in {path}",
            "no recipe.json",
            "a run's folder holds the recipe it was started with",
            "skimp train RECIPE.yaml",
        )
    if not resume:
        raise RecipeError(
            f"skimp train {path}",
            "the folder of a run",
            "it has begun already",
            f"skimp train {path} --resume",
        )
    return stored_recipe(stored, *words, f"output={json.dumps(str(path))}")
