"""`skimp report RUN`: make a run's pictures again, also of one that is still running or has died."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skimp.cli.complete import run_folders


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder.", autocompletion=run_folders)],
) -> None:
    """Draw report.html and memory.png from the files in a run's folder."""
    from skimp.report.make import make

    for sentence in make(run):
        print(sentence)
