"""The memory ladder: one technique more on every rung, each a `skimp train` of its own, side by side in one run.

    python benchmarks/ladder.py  # ten runs of three steps: about ten minutes on two slow cores
    python benchmarks/ladder.py --only all-at-once,micro-batch --steps 2

SmolLM2-135M on the quickstart's text, sequence 512, 2,048 tokens a step. A rung pins everything it is about, so what
it shows is that technique's and no choice of the planner's. The last rungs change the mathematics; they say so.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import measure

#: name -> (what it adds, whether the mathematics stays, overrides). Every rung repeats what it keeps of the one before.
HELD = ["exact.in_backward=false"]
RUNGS: dict[str, tuple[str, bool, list[str]]] = {
    "c-library": (
        "all rows at once, plain layers, the C library's allocator (chunked loss and own attention only)", True,
        ["exact.micro_batch=4", "exact.recompute=none", *HELD, "exact.kernels=plain", "exact.malloc=return"],
    ),
    "pool": ("+ tensor pool", True,
        ["exact.micro_batch=4", "exact.recompute=none", *HELD, "exact.kernels=plain", "exact.malloc=pool"]),
    "fused": ("+ fused RMSNorm and SwiGLU", True, ["exact.micro_batch=4", "exact.recompute=none", *HELD]),
    "micro-batch": ("+ micro-batches of one row", True, ["exact.micro_batch=1", "exact.recompute=none", *HELD]),
    "recompute-half": ("+ recompute 15 of 30 blocks", True, ["exact.micro_batch=1", "exact.recompute=15", *HELD]),
    "recompute-all": ("+ recompute every block", True, ["exact.micro_batch=1", "exact.recompute=all", *HELD]),
    "in-backward": ("all rows at once, recompute, step in backward (two passes, for the clipping norm)", True,
        ["exact.micro_batch=4", "exact.recompute=all", "exact.in_backward=true"]),
    "8-bit": ("micro-batches, recompute, 8-bit AdamW", False,
        ["exact.micro_batch=1", "exact.recompute=all", *HELD, "optimizer=adamw8bit"]),
    "bf16-8-bit": ("+ bfloat16 weights, stochastic rounding", False,
        ["exact.micro_batch=1", "exact.recompute=all", *HELD, "optimizer=adamw8bit", "precision=bf16"]),
    "lora": ("LoRA of rank 16 on every linear layer, fp32 base, micro-batches", False,
        ["exact.micro_batch=1", "exact.recompute=none", *HELD, "adapter=lora", "train.lr=2e-4"]),
}  # fmt: skip
ALWAYS = ["budget=20GB", "eval=null", "sample=null", "checkpoint.at_end=false", "report=false"]


def rung(name: str, steps: int, work: Path) -> dict[str, Any]:
    """Run one rung in a process of its own."""
    _, _, overrides = RUNGS[name]
    shutil.rmtree(work / "run", ignore_errors=True)
    rule = [] if any(o.startswith("optimizer=") for o in overrides) else ["optimizer=adamw"]
    words = ["train", "examples/quickstart.yaml", *rule, *overrides]
    words += [*ALWAYS, f"train.steps={steps}", f"output={work / 'run'}"]
    measure.watch(measure.skimp(*words), work / "log.txt").check(name)
    found = json.loads((work / "run" / "summary.json").read_text("utf-8"))
    metrics = [json.loads(x) for x in (work / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    steady = [m["tokens"] / m["seconds"] for m in metrics[1:]]
    return {
        "peak": found["rss_peak_bytes"], "planned": found["planned_rss_bytes"], "rate": median(steady),
        "loss": metrics[-1]["loss"], "typed": " ".join([*rule, *overrides]),
    }  # fmt: skip


def main() -> None:
    parser = measure.runs_parser(__doc__, RUNGS, "runs/bench-ladder")
    args, names = measure.parsed(parser, RUNGS)
    work = Path(args.work).resolve()
    results, source = measure.Results(work / "results.json", args.fresh), measure.source_digest()
    rows: dict[str, dict[str, Any]] = {
        n: results.row(n, [n, args.steps, RUNGS[n][2], source, measure.versions()], partial(rung, n, args.steps, work))
        for n in names
    }
    first = rows[names[0]]
    print(f"SmolLM2-135M, sequence 512, 2,048 tokens a step, {args.steps} steps each\n{measure.machine()}\n")
    print(measure.table(
        ["rung", "mathematics", "planned", "whole process", "of the first", "tokens/s", "of the first", "loss"],
        [[RUNGS[n][0], "same" if RUNGS[n][1] else "changed", measure.gb(r["planned"]), measure.gb(r["peak"]),
          f"{r['peak'] / first['peak']:.2f}", f"{r['rate']:.0f}", f"{r['rate'] / first['rate']:.2f}",
          f"{r['loss']:.4f}"] for n, r in rows.items()],
    ))  # fmt: skip
    print("\neach rung: skimp train examples/quickstart.yaml " + " ".join(ALWAYS[:1]) + " and")
    for name, row in rows.items():
        print(f"  {name}: {row['typed']}")
    measure.write_json(args.json, {"rows": rows, "machine": measure.machine()})


if __name__ == "__main__":
    main()
