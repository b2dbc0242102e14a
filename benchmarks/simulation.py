"""One simulation in a process of its own: what `plan.py` and `memtracker.py` start and time.

    python benchmarks/simulation.py llama-3-8b full

Prints one line of JSON: seconds on the clock and of the processor, imports apart, and the peak in bytes. Ways:
full        two optimizer steps with every micro-batch, and an evaluation batch
step        one optimizer step of one micro-batch, every block
extended    the same profile from four simulations of a few blocks
search      the whole search for a card
host        the whole search for this machine's processor
memtracker  `step`, watched by torch's own MemTracker instead
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SEQ, ROWS = 4096, 4
CARDS = {"llama-3-8b": "24GB", "llama-3-70b": "80GB"}
#: For `host`: an amount that takes some recompute.
HOST = {"llama-3-8b": 160_000_000_000, "llama-3-70b": 1_300_000_000_000}


def prepared(model: str, rows: int) -> tuple[Any, dict[str, Any]]:
    """(recipe, config), everything a simulation needs imported."""
    from skimp.core.lean import stay_lean

    stay_lean()
    import torch

    from skimp.plan import make, simulate  # noqa: F401
    from skimp.recipe import check_model, load_recipe, resolve_model
    from skimp.run.skeleton import skeleton

    values = {"model": model, "data": {"train": "pydoc", "seq_len": SEQ}, "output": "runs/plan"}
    recipe = load_recipe({**values, "train": {"steps": 1, "batch_tokens": rows * SEQ}})
    source = resolve_model(recipe.model)
    check_model(recipe, source)
    skeleton({**source.config, "num_hidden_layers": 1}, torch.float32)
    return recipe, source.config


def way(name: str, model: str, recompute: bool) -> Callable[[], int]:
    """What is timed; returns the peak in bytes of training."""
    recipe, config = prepared(model, ROWS if name in ("full", "search", "host") else 1)
    from skimp.core.exact import ExactChoices
    from skimp.plan.cost import Rates
    from skimp.plan.make import make_plan
    from skimp.plan.search import Search
    from skimp.plan.simulate import simulate

    blocks = int(config["num_hidden_layers"])
    rates = Rates(1e14, 1e12, "a card")
    exact = ExactChoices(1, tuple(range(blocks)) if recompute else (), None, False)
    if name == "memtracker":
        return lambda: watched_by_torch(recipe, exact, config)
    if name == "extended":
        search = Search(recipe, config, blocks, {"return": (10**15, 1.0)}, rates, "cuda")
        return lambda: search.proved(exact).peak.total
    if name == "search":
        return lambda: make_plan(recipe, config, gpu=CARDS[model], offer=False).profile.peak.total
    if name == "host":
        return lambda: make_plan(recipe, config, gpu="cpu", memory=HOST[model], offer=False).profile.peak.total
    options: dict[str, Any] = {"steps": 1, "evaluate": False} if name == "step" else {}
    return lambda: simulate(recipe, exact, config, rates=rates, target="cuda", **options).peak.total


def watched_by_torch(recipe: Any, exact: Any, config: dict[str, Any]) -> int:
    """The peak that MemTracker counts in one step of one micro-batch; more it does not support."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from skimp.core import attention
    from skimp.core.batch import Batch
    from skimp.run.build import build

    mode, theirs = FakeTensorMode(), MemTracker()
    with attention.target("cuda"):
        run = build(recipe, exact, config, simulate=mode)
        with mode:
            ids, labels, positions = (torch.zeros(1, SEQ, dtype=torch.int64) for _ in range(3))
            source = torch.zeros(1, dtype=torch.int64)
        batch = Batch(ids, labels, positions, ((0, SEQ - 1, SEQ),), SEQ, source=source)
        theirs.track_external(run.model, run.optimizer, *batch.tensors())
        with mode, theirs:
            run.step(batch)
    return sum(places["Total"] for places in theirs.get_tracker_snapshot("peak").values())


def main() -> None:
    model, name = sys.argv[1:3]
    os.environ["SKIMP_PLAN_CACHE"] = "0"
    timed = way(name, model, recompute="recompute" in sys.argv[3:])
    if name == "memtracker":
        import torch.distributed._tools.mem_tracker  # noqa: F401
    clock, processor = time.perf_counter(), time.process_time()
    peak = timed()
    print(
        json.dumps({
            "seconds": time.perf_counter() - clock,
            "processor": time.process_time() - processor,
            "peak": peak,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
