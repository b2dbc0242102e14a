"""A memory ladder inside Hugging Face `Trainer`: one more of skimp's techniques attached on every rung.

    python benchmarks/attach.py  # about ten minutes on two slow cores
    python benchmarks/attach.py --steps 2 --seq 64  # smoke

SmolLM2-135M (real weights), the Python language reference, 4 rows of 512 tokens a step, float32 AdamW, clipping at 1.0:
the work of `hf.py`. Every rung is a process of its own and keeps what the rungs above it have. Memory is the highest
resident set of that process; the last column is the largest difference of a step's loss from plain Trainer's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import measure
from hf import child

#: name -> what it adds to the rung above.
LADDER: dict[str, dict[str, Any]] = {
    "HF Trainer": {},
    "+ AdamW of skimp": {"rule": "adamw"},
    "+ fused": {"attach": {"fused": True}},
    "+ chunked loss": {"attach": {"chunked_loss": True}},
    "+ documents": {"attach": {"documents": True}},
    "+ recompute": {"attach": {"recompute": "all"}},
    "+ step in backward": {"attach": {"step_in_backward": True}},
    "+ 8-bit states": {"rule": "adamw8bit"},
}
ROWS = 4


def climb(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every rung, run or recalled."""
    work = Path(args.work).resolve()
    name = f"{args.seq}-{args.steps}"
    job: dict[str, Any] = {
        "model": str(work / "smollm2-135m-fp32"), "text": str(work / f"text-{name}.jsonl"),
        "ids": str(work / f"ids-{name}.npy"), "output": str(work / "out"), "seq": args.seq, "steps": args.steps,
        "run_steps": args.steps, "rows": ROWS, "settings": {"per_device_train_batch_size": ROWS},
        "out": str(work / "trainer.json"), "rule": None, "attach": {},
    }  # fmt: skip
    results, source = measure.Results(work / "attach.json", args.fresh), measure.source_digest()
    if not Path(job["ids"]).is_file():
        child("prepare", job, work)
    found = {}
    for rung, more in LADDER.items():
        job["rule"] = more.get("rule", job["rule"])
        job["attach"] = {**job["attach"], **more.get("attach", {})}
        key = [rung, job, measure.versions(), source]
        row = results.get(key)
        if row is None:
            print(f"{rung} …", file=sys.stderr, flush=True)
            peak = child("trainer", job, work).peak
            row = results.put(key, {**json.loads(Path(job["out"]).read_text("utf-8")), "peak": peak})
        found[rung] = dict(row)
    return found


def report(found: dict[str, dict[str, Any]], tokens: int) -> None:
    """Print the ladder."""
    first = next(iter(found.values()))
    lines = []
    for rung, row in found.items():
        gap = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
        above = row["peak"] - row["baseline"]
        lines.append([
            rung, measure.gb(row["peak"]), measure.gb(above), f"{row['peak'] / first['peak']:.2f}",
            f"{tokens / row['seconds'][-1]:.0f}", f"{gap:.1e}",
        ])  # fmt: skip
    head = ["in Trainer", "peak", "above baseline", "of plain", "tokens/s, last step", "loss differs by"]
    print(measure.table(head, lines))
    print("\n" + measure.machine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--work", default="runs/bench-hf", help="folder of hf.py's model and rows, and of the results")
    parser.add_argument("--fresh", action="store_true", help="forget finished rungs")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    found = climb(args)
    report(found, ROWS * args.seq)
    measure.write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
