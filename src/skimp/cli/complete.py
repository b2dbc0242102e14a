"""What the shell offers after TAB: recipe files, runs, methods, and `key=value` from the recipe's own schema.

Completion runs at every press of a key, so nothing here imports torch, and pydantic only when a recipe key is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: How deep a run is looked for below the folder the user stands in: `runs/quickstart`.
DEPTH = ("*", "*/*")


def run_folders(incomplete: str) -> Iterator[str]:
    """Folders that hold a run."""
    base = Path(incomplete) if incomplete.endswith("/") else Path(incomplete or ".").parent
    found = {path.parent for depth in DEPTH for path in base.glob(f"{depth}/run.json")}
    for folder in sorted(found):
        if str(folder).startswith(incomplete):
            yield str(folder)
