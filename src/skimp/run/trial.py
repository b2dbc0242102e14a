"""`python -m skimp.run.trial`: two real optimizer steps of a planned run, with random weights, measured; as JSON.

A process of its own, like the run's: its baseline is measured before any tensor, the allocator is the plan's, the rows
are random tokens in the split that the plan has simulated. The first step is watched by the tracker, the second timed.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from skimp.core.exact import ExactChoices
from skimp.core.lean import stay_lean
from skimp.core.memory.process import give_back, reset_peak, resident, set_malloc_policy


def measure(words: dict[str, Any]) -> dict[str, Any]:
    """Take the steps.

    Args:
        words: `recipe` (plain values), `config`, `exact`, `pool` (the limit in bytes).

    Returns:
        `baseline`, `tensors`, `process` in bytes, `seconds` of the second step, `versions`.
    """
    stay_lean()
    set_malloc_policy()
    from skimp.core.memory.tracker import Tracker
    from skimp.core.rng import seed_everything
    from skimp.data import synthetic_batch
    from skimp.kernels.native import pool
    from skimp.plan.places import measure_baseline
    from skimp.recipe import load_recipe
    from skimp.run.build import build
    from skimp.run.environment import environment
    from skimp.run.resting import resting_below
    from skimp.run.weights import init_scratch

    recipe, config, exact = load_recipe(words["recipe"], []), words["config"], ExactChoices.from_dict(words["exact"])
    baseline = measure_baseline(recipe, config)
    with ExitStack() as stack:
        set_malloc_policy(exact.malloc)
        if exact.malloc == "pool":
            pool.install(words["pool"])
            stack.callback(pool.remove)
        seed_everything(recipe.train.seed)
        give_back()
        reset_peak()
        run = build(recipe, exact, config, fill=lambda model: init_scratch(model, recipe.model.seed))
        stack.callback(run.close)
        if exact.malloc == "pool":
            pool.set_limit(words["pool"] - resting_below(run, pool.SMALLEST))
        run.set_lr(recipe.train.lr)
        documents: Any = "worst_packed" if recipe.data.packing and recipe.data.seq_len > 2 else "whole"
        batch = synthetic_batch(recipe.data.seq_len, recipe.rows_per_step, config["vocab_size"], documents)
        tracker = Tracker()
        run.show_to(tracker, batch)
        with tracker:
            run.step(batch)
        begin = time.perf_counter()
        run.step(batch)
        seconds = time.perf_counter() - begin
    return {
        "baseline": baseline,
        "tensors": tracker.peak.total,
        "process": resident().peak,
        "seconds": seconds,
        "versions": environment(),
    }


if __name__ == "__main__":
    # Whatever a library prints goes to stderr: the answer is the only line of stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(measure(json.load(sys.stdin))), file=answer)
