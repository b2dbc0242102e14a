"""What a logger costs in memory: the training process before and beside it, and the logger's own process.

    make bench-loggers

The child follows a metrics.jsonl of two hundred rows that this script writes; W&B writes offline, Trackio locally.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from skimp.core.units import format_bytes
from skimp.recipe import load_recipe
from skimp.run.loggers import start
from skimp.run.voice import Voice

LOGGERS = {"tensorboard": {}, "trackio": {"project": "skimp-bench"}, "wandb": {"mode": "offline"}}


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def descendants(pid: int) -> list[int]:
    """A process's children, theirs, and so on."""
    mine = [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]
    return [*mine, *(d for p in mine for d in descendants(p))]


def measure(name: str, folder: Path) -> tuple[int, int]:
    """(growth of this process, the logger's processes) in resident bytes."""
    base = {"model": "smollm2-135m", "data": {"train": "pydoc"}, "output": str(folder), "log": {name: LOGGERS[name]}}
    recipe = load_recipe(base)
    before = resident(os.getpid())
    with start.following(recipe, folder, Voice()) as loggers:
        assert loggers is not None
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 201):
                row = {"step": step, "loss": 2.0, "lr": 1e-5, "grad_norm": 1.0, "tokens_per_second": 100.0}
                file.write(json.dumps({**row, "memory_bytes": 10**9, "memory_peak_bytes": 10**9}) + "\n")
        loggers.begin(10**9, 2 * 10**9)
        time.sleep(6)
        loggers.listen()
        theirs = sum(resident(p) for p in descendants(os.getpid()))
        grown = resident(os.getpid()) - before
    told = json.loads((folder / "loggers.json").read_text())[name]["step"]
    assert told == 200, f"{name} was told {told} of 200 steps"
    return grown, theirs


def main() -> None:
    print(f"{'logger':<14}{'training process':>18}{'its own process':>18}")
    for name in LOGGERS:
        found = find_spec(name)
        if found is None or found.origin is None:
            print(f"{name:<14}{'not installed: pip install ' + repr(f'skimp[{name}]'):>36}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRACKIO_DIR"] = folder + "/trackio"
            grown, theirs = measure(name, Path(folder))
        print(f"{name:<14}{'+' + format_bytes(max(grown, 0)):>18}{format_bytes(theirs):>18}")


if __name__ == "__main__":
    main()
