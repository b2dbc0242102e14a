"""skimp's simulation against torch's own MemTracker on the same simulated step: equal bytes, and how much faster.

    python benchmarks/memtracker.py             # llama-3-8b, kept and recomputed, three processes each: minutes
    python benchmarks/memtracker.py --repeat 1

The step is one micro-batch of 4,096 tokens, forward, backward and AdamW, on simulated tensors; a second micro-batch
MemTracker does not support. Every figure is a fresh process, imports apart, the model's construction included.
Exit code 1 when totals differ or a ratio is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import measure

WAYS = {"memtracker": "torch's MemTracker", "step": "skimp, every block", "extended": "skimp, extended from a few"}
#: The least ratio to MemTracker.
WANTED = {"step": 1.5, "extended": 10.0}


def timed(model: str, way: str, *more: str, repeat: int, work: Path) -> list[dict[str, Any]]:
    """What `repeat` processes of `simulation.py` printed."""
    script = str(Path(__file__).with_name("simulation.py"))
    found = []
    for _ in range(repeat):
        child = measure.watch([sys.executable, script, model, way, *more], work / f"{model}-{way}.txt").check(way)
        found.append(json.loads(child.out[child.out.rindex("{") :]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes for each figure")
    parser.add_argument("--model", default="llama-3-8b", help="a preset")
    parser.add_argument("--work", default="runs/bench-memtracker", help="folder of the children's output")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    work = Path(args.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    lines, claims, rows = [], [], []
    for blocks, more in (("kept", ()), ("recomputed", ("recompute",))):
        found = {way: timed(args.model, way, *more, repeat=args.repeat, work=work) for way in WAYS}
        seconds = {way: measure.middle([r["processor"] for r in runs]) for way, runs in found.items()}
        totals = {r["peak"] for runs in found.values() for r in runs}
        for way, name in WAYS.items():
            ratio = seconds["memtracker"] / seconds[way]
            clock = measure.middle([r["seconds"] for r in found[way]])
            lines.append([blocks, name, f"{seconds[way]:.2f} s", f"{clock:.2f} s", f"{ratio:.1f} x",
                          f"{found[way][0]['peak']:,}"])  # fmt: skip
            rows.append({"blocks": blocks, "way": way, "seconds": seconds[way], "clock": clock, "runs": found[way]})
            if way in WANTED:
                claims.append((f"{blocks}, {name}: times faster", ratio, ">=", WANTED[way]))
        claims.append((f"{blocks}: different totals", float(len(totals) - 1), "<=", 0.0))
    print(f"{args.model}, one step of one row of 4,096 tokens; median of {args.repeat}\n{measure.machine()}\n")
    print(measure.table(["blocks", "", "processor", "clock", "faster", "peak bytes"], lines))
    said, good = measure.verdicts(claims)
    print("\n" + "\n".join(said))
    measure.write_json(args.json, {"rows": rows, "verdicts": said, "machine": measure.machine()})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
