"""The files of `skimp plan`: the page and the picture of the planned step. Checked before anything is planned."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from skimp.core.errors import RecipeError


def check(html: str | None, png: str | None) -> None:
    """Refuse early what could not be written at the end.

    Raises:
        RecipeError: a folder that is not there or cannot be written, a folder in the file's place; no matplotlib.
    """
    for option, name in (("--html", html), ("--png", png)):
        if name is None:
            continue
        path = Path(name)
        folder = path.absolute().parent
        if path.is_dir() or not name:
            raise RecipeError(f"{option} {name}", "a folder", instead=f"{option} {path / 'plan'}.{option[2:]}")
        if not folder.is_dir():
            raise RecipeError(f"{option} {name}", f"no folder {folder}", instead=f"mkdir -p {folder}")
        if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
            raise RecipeError(f"{option} {name}", "it cannot be written", instead="a file in a folder of yours")
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise RecipeError("--png", "matplotlib is not installed", instead=["pip install 'skimp[report]'", "--html"])


def write(plan: Any, drawn: dict[str, Any], html: str | None, png: str | None) -> None:
    """Write them, each replaced whole; say where on stderr, so that `--json` and `--markdown` stay alone on stdout."""
    from skimp.report.make import replace
    from skimp.report.plan_page import plan_page, story_of
    from skimp.report.step_memory import step_memory

    told = plan.as_dict()
    if html is not None:
        replace(Path(html), plan_page(told, drawn).encode())
        print(f"plan: {html}", file=sys.stderr)
    if png is not None:
        from skimp.report.png import memory_png

        memory = step_memory(story_of(told, drawn))
        if memory is not None:
            replace(Path(png), memory_png(memory, f"{plan.model}, planned"))
            print(f"memory over the planned step: {png}", file=sys.stderr)
