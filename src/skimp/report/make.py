"""Make both pictures of a run from its folder, each replaced whole or not at all."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from skimp.report.gather import gather
from skimp.report.page import page
from skimp.report.step_memory import step_memory

NO_PNG = "memory.png is not drawn: matplotlib is not installed; pip install 'skimp[report]', then skimp report {folder}"


def make(folder: Path) -> list[str]:
    """Write `report.html` and `memory.png` into a run's folder.

    Returns:
        One sentence on each.

    Raises:
        CheckpointError: no run there, no finished step, or a damaged file.
    """
    story = gather(folder)
    memory = step_memory(story)
    replace(folder / "report.html", page(story, memory).encode())
    said = [f"report: {folder / 'report.html'}"]
    if memory is None:
        return said
    if importlib.util.find_spec("matplotlib") is None:
        return [*said, NO_PNG.format(folder=folder)]
    from skimp.report.png import memory_png

    replace(folder / "memory.png", memory_png(memory, story.name))
    return [*said, f"memory over one step: {folder / 'memory.png'}"]


def replace(path: Path, data: bytes) -> None:
    """The whole file or the old one."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
