"""How long `skimp plan` takes from a cold start, and how much memory: imports included, weights never
created.

    python benchmarks/plan.py  # three runs each of 8B, 70B and 135M, and of their simulations: about four minutes
    python benchmarks/plan.py --repeat 1 --only smollm2-135m

Every figure is a fresh process; the table gives the median time and the highest memory. Exit code 1 when a
limit is missed or a process took as much memory as weights would need.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import measure
from memtracker import timed

#: model -> (what `skimp plan` is told besides, seconds allowed; None where nothing was promised).
CASES: dict[str, tuple[list[str], float | None]] = {
    "llama-3-8b": (["--gpu", "24GB", "--seq", "4096", "--no-cache"], 10.0),
    "llama-3-70b": (["--gpu", "80GB", "--seq", "4096", "--no-cache"], 15.0),
    "smollm2-135m": (["--memory", "2GB", "--seq", "512", "--optimizer", "adamw8bit", "--no-cache"], None),
}
#: (model, way of `simulation.py`) -> (name, seconds allowed), imports apart.
SIMULATIONS: dict[tuple[str, str], tuple[str, float]] = {
    ("llama-3-8b", "extended"): ("one simulation, extended", 1.5),
    ("llama-3-8b", "full"): ("one simulation, in full", 6.0),
    ("llama-3-70b", "extended"): ("one simulation, extended", 3.0),
    ("llama-3-70b", "full"): ("one simulation, in full", 15.0),
    ("llama-3-8b", "search"): ("a full search, 24 GB card", 15.0),
    ("llama-3-8b", "host"): ("a full search, 160 GB host", 15.0),
}
#: Of 8 billion parameters in bfloat16 the weights alone are 16 GB.
MEMORY_LIMIT = 2_000_000_000


def case(model: str, repeat: int, seq: int | None, work: Path) -> dict[str, Any]:
    """Plan one model `repeat` times."""
    options, limit = CASES[model]
    words = ["plan", "--model", model, *options, "--json"]
    if seq is not None:
        words[words.index("--seq") + 1] = str(seq)
    runs = []
    for _ in range(repeat):
        child = measure.watch(measure.skimp(*words), work / "plan.txt")
        if child.code not in (0, 3):
            child.check(model)
        runs.append(child)
    found = json.loads(child.out[child.out.index("{") :])
    return {
        "model": model, "command": "skimp " + " ".join(words[:-1]), "seconds": [c.seconds for c in runs],
        "peak": max(c.peak for c in runs), "limit": limit,
        "fits": found["fits"], "planned": found["peak_bytes"], "parameters": found["parameters"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", "--steps", type=int, default=3, help="fresh processes for each model")
    parser.add_argument("--seq", type=int, help="another sequence length for all of them")
    parser.add_argument("--only", choices=list(CASES), help="this model alone")
    parser.add_argument("--work", default="runs/bench-plan", help="folder of the children's output")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    work = Path(args.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows = [case(m, args.repeat, args.seq, work) for m in CASES if args.only in (None, m)]
    print(f"fresh processes, median of {args.repeat}\n{measure.machine()}\n")
    lines = [
        [r["command"], f"{r['parameters'] / 1e9:.2f}", f"{measure.middle(r['seconds']):.1f} s",
         f"{min(r['seconds']):.1f} – {max(r['seconds']):.1f} s", measure.gb(r["peak"]),
         "fits" if r["fits"] else "does not fit", measure.gb(r["planned"])]
        for r in rows
    ]  # fmt: skip
    head = ["command", "10⁹ parameters", "wall", "least – most", "peak memory", "answer", "planned peak"]
    print(measure.table(head, lines))
    claims = [(f"{r['model']}: seconds", measure.middle(r["seconds"]), "<=", r["limit"]) for r in rows if r["limit"]]
    claims += [(f"{r['model']}: peak in GB", r["peak"] / 1e9, "<=", MEMORY_LIMIT / 1e9) for r in rows]
    simulated = [
        {"model": model, "way": way, "runs": timed(model, way, repeat=args.repeat, work=work)}
        for model, way in SIMULATIONS
        if args.only in (None, model) and args.seq is None
    ]
    lines = []
    for row in simulated:
        name, limit = SIMULATIONS[row["model"], row["way"]]
        clock = measure.middle([r["seconds"] for r in row["runs"]])
        processor = measure.middle([r["processor"] for r in row["runs"]])
        lines.append([row["model"], name, f"{clock:.2f} s", f"{processor:.2f} s", f"{limit:g} s"])
        claims.append((f"{row['model']}: {name}", clock, "<=", limit))
    if lines:
        print("\nimports apart\n\n" + measure.table(["model", "", "clock", "processor", "allowed"], lines))
    said, good = measure.verdicts(claims)
    print("\n" + "\n".join(said))
    measure.write_json(
        args.json, {"rows": rows, "simulations": simulated, "verdicts": said, "machine": measure.machine()}
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
