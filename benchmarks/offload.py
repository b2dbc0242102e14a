"""Offload: full AdamW on SmolLM2, states and activations on disk: memory planned and measured, time, and the losses.

    python benchmarks/offload.py  # five runs of three steps: about five minutes on two slow cores
    python benchmarks/offload.py --only plain,both --seq 256

Every run has the same rows a step and the same micro-batches, so its losses must be those of the plain run to the bit;
the table says whether they are. "moved" is what a step writes to disk and reads back.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import measure

HELD, ROWS = ["exact.in_backward=false", "exact.recompute=none"], ["exact.micro_batch=4"]
NONE = "exact.offload={activations: none, optimizer: none}"
ACTIVATIONS = "exact.offload={activations: disk, blocks: all, optimizer: none}"
STATES = "exact.offload={activations: none, optimizer: disk}"
BOTH = "exact.offload={activations: disk, blocks: all, optimizer: disk}"
#: name -> (what waits where, overrides).
RUNS: dict[str, tuple[str, list[str]]] = {
    "plain": ("nothing", [*ROWS, *HELD, NONE]),
    "activations": ("activations of all blocks", [*ROWS, *HELD, ACTIVATIONS]),
    "states": ("optimizer states", [*ROWS, *HELD, STATES]),
    "both": ("both", [*ROWS, *HELD, BOTH]),
    "least": ("both, and gradients freed in backward (two passes)",
        [*ROWS, "exact.in_backward=true", "exact.recompute=none", BOTH]),
}  # fmt: skip
ALWAYS = ["budget=20GB", "eval=null", "sample=null", "checkpoint.at_end=false", "report=false", "optimizer=adamw"]


def run(name: str, steps: int, seq: int, work: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    shutil.rmtree(work / "run", ignore_errors=True)
    words = ["train", "examples/quickstart.yaml", *RUNS[name][1], *ALWAYS, f"data.seq_len={seq}"]
    words += [f"train.batch_tokens={4 * seq}", f"train.steps={steps}", f"output={work / 'run'}"]
    measure.watch(measure.skimp(*words), work / "log.txt").check(name)
    found = json.loads((work / "run" / "summary.json").read_text("utf-8"))
    metrics = [json.loads(x) for x in (work / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "planned": found["planned_rss_bytes"], "peak": found["rss_peak_bytes"], "baseline": found["rss_baseline_bytes"],
        "tracked": found["measured_peak_bytes"], "simulated": found["planned_peak_bytes"],
        "predicted": found["plan"]["predicted_step_seconds"], "seconds": median(m["seconds"] for m in metrics[1:]),
        "disk": found["plan"]["places"]["disk"]["peak_bytes"],
        "numbers": [[m["loss"].hex(), m["grad_norm"].hex()] for m in metrics], "loss": metrics[-1]["loss"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a run, the first not timed")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row; a step has four rows")
    parser.add_argument("--only", default="", help=f"of {', '.join(RUNS)}")
    parser.add_argument("--work", default="runs/bench-offload", help="folder of the runs and of finished rows")
    parser.add_argument("--fresh", action="store_true", help="forget finished rows")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    names = [n for n in args.only.split(",") if n] or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"--only {', '.join(sorted(unknown))}: known are {', '.join(RUNS)}")
    if args.steps < 2:
        parser.error("--steps 2 at least: the first is not timed")
    work = Path(args.work).resolve()
    results, source = measure.Results(work / "results.json", args.fresh), measure.source_digest()
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        key = [name, args.steps, args.seq, RUNS[name][1], source, measure.versions()]
        found = results.get(key)
        if found is None:
            print(f"{name} …", file=sys.stderr, flush=True)
            found = results.put(key, run(name, args.steps, args.seq, work))
        rows[name] = found
    first = rows[names[0]]
    print(f"SmolLM2-135M, AdamW, sequence {args.seq}, four rows a step, {args.steps} steps\n{measure.machine()}\n")
    print(measure.table(
        ["on disk", "planned", "whole process", "of the first", "simulated = tracked", "s a step", "of the first",
         "predicted", "losses and norms"],
        [[RUNS[n][0], measure.gb(r["planned"]), measure.gb(r["peak"]), f"{r['peak'] / first['peak']:.2f}",
          "yes" if r["simulated"] == r["tracked"] else f"{r['simulated']:,} / {r['tracked']:,}",
          f"{r['seconds']:.2f}", f"{r['seconds'] / first['seconds']:.2f}", f"{r['predicted']:.2f}",
          "same bits" if r["numbers"] == first["numbers"] else f"differ, {r['loss']:.6f}"] for n, r in rows.items()],
    ))  # fmt: skip
    measure.write_json(args.json, {"rows": rows, "machine": measure.machine()})


if __name__ == "__main__":
    main()
