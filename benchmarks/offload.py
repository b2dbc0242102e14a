"""Offload: full AdamW on SmolLM2, states and activations on disk: memory planned and measured, time, and the losses.

    python benchmarks/offload.py  # five runs of three steps: about five minutes on two slow cores
    python benchmarks/offload.py --only plain,both --seq 256

Every run has the same rows a step and the same micro-batches, so its losses must be those of the plain run to the bit;
the table says whether they are.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
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
        "away": found["away"], "disk": found["plan"]["places"]["disk"]["peak_bytes"],
        "numbers": [[m["loss"].hex(), m["grad_norm"].hex()] for m in metrics], "loss": metrics[-1]["loss"],
    }  # fmt: skip


def _traffic(label: str, away: dict[str, float], steps: int) -> list[str]:
    """What the tier counted, per step. Hidden: the share of its copying that the computation did not wait for; the
    threads that copy run on the same cores."""
    rate = (away["out"] + away["back"]) / away["moving"]
    return [label, measure.gb(away["out"] / steps), measure.gb(away["back"] / steps), f"{rate / 1e9:.2f} GB/s",
            f"{away['moving'] / steps:.2f}", f"{away['waited'] / steps:.2f}", f"{away['hidden']:.0%}"]  # fmt: skip


def main() -> None:
    parser = measure.runs_parser(__doc__, RUNS, "runs/bench-offload")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row; a step has four rows")
    args, names = measure.parsed(parser, RUNS)
    work = Path(args.work).resolve()
    results, source = measure.Results(work / "results.json", args.fresh), measure.source_digest()
    rows: dict[str, dict[str, Any]] = {
        n: results.row(
            n,
            [n, args.steps, args.seq, RUNS[n][1], source, measure.versions()],
            partial(run, n, args.steps, args.seq, work),
        )
        for n in names
    }
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
    moved = {n: r for n, r in rows.items() if r["away"]}
    if moved:
        print("\n" + measure.table(
            ["activations on disk", "out a step", "back a step", "written and read at", "copying, s a step",
             "waited for, s a step", "hidden"],
            [_traffic(RUNS[n][0], r["away"], args.steps) for n, r in moved.items()],
        ))  # fmt: skip
    measure.write_json(args.json, {"rows": rows, "machine": measure.machine()})


if __name__ == "__main__":
    main()
