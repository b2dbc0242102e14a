"""One configuration of `accuracy.py` in a process of its own: `python accuracy_case.py NAME WORK` prints a row.

First the run as `skimp train` makes it, with the system's own mark of the process; then, on a fresh run of the same
choices, the c10 allocator's events over two steps of the costliest batch, which the plan has simulated.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import accuracy_cases


def session(name: str, work: Path) -> dict[str, Any]:
    """Train by the verb, and what the folder says of it."""
    from skimp.cli.train import command
    from skimp.kernels.native import pool

    words = accuracy_cases.recipe(name, work)
    folder = Path(words["output"])
    shutil.rmtree(folder, ignore_errors=True)
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(words), "utf-8")
    command(str(path), quiet=True)
    found = json.loads((folder / "summary.json").read_text("utf-8"))
    after = [json.loads(x)["memory_bytes"] for x in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    shutil.rmtree(folder)
    plan = found["plan"]
    return {
        "predicted": found["planned_rss_bytes"], "measured": found["rss_peak_bytes"],
        "baseline": found["rss_baseline_bytes"], "planned": found["planned_peak_bytes"],
        "phases": plan["phases"], "tracked": found["measured_peak_bytes"], "after_steps": after,
        "policy": plan["chosen"]["malloc"], "chosen": plan["chosen"], "by_category": plan["by_category"],
        "waiting": pool.statistics().highest if pool.available() else None,
        "seconds": found["seconds_per_step"], "planned_seconds": plan["predicted_step_seconds"],
        "threads": found["versions"]["threads"],
    }  # fmt: skip


def allocated(name: str, chosen: dict[str, Any], work: Path) -> int:
    """Highest bytes by the allocator's own events over two real steps, what rested before included."""
    from skimp.core.exact import ExactChoices
    from skimp.core.memory.oracle import witness
    from skimp.core.memory.tracker import Tracker
    from skimp.data import synthetic_batch
    from skimp.recipe import load_recipe, resolve_model
    from skimp.run.build import build
    from skimp.run.weights import init_scratch

    recipe = load_recipe(accuracy_cases.recipe(name, work), [])
    config = resolve_model(recipe.model).config
    seq, rows = recipe.data.seq_len, recipe.rows_per_step
    # Ids of a small vocabulary: what is scored is a table of the whole one in any case.
    batch = synthetic_batch(seq, rows, min(config["vocab_size"], 512), (0, seq - 1, seq))
    run = build(recipe, ExactChoices.from_dict(chosen), config, fill=lambda model: init_scratch(model, 0))
    tracker = Tracker()
    run.show_to(tracker, batch)
    rest = tracker.live

    def two_steps() -> None:
        for _ in range(2):
            run.step(batch)

    _, seen = witness(two_steps)
    run.close()
    return rest + seen.peak


def main() -> None:
    name, work = sys.argv[1], Path(sys.argv[2])
    row = session(name, work)
    print(json.dumps({"name": name, **row, "c10": allocated(name, row["chosen"], work)}))


if __name__ == "__main__":
    main()
