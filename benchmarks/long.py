"""Long sequences on one machine: real steps of SmolLM2-135M at 16,384 and 8,192 tokens, and the longest row in 8 GB.

    python benchmarks/long.py                            # half an hour on two slow cores: a real step takes minutes
    python benchmarks/long.py --only lora-16k-disk,full-8k  # some of the steps
    python benchmarks/long.py --only none --longest      # no step: the longest row by simulation, some minutes
    python benchmarks/long.py --only none --boundary     # 4 layers: a real step just below, a refusal just above

Every step is one optimizer step over one row, float32, on real weights; rows beyond 8,192 tokens are past the model's
positions, a test of memory and time (`model.positions: extend`). "Plain" is the Hugging Face model with its own layers
and loss, nothing recomputed, torch's AdamW, one row; its peak is simulated by the same tracker, without the S x S mask
that a simulated Hugging Face attention would make, and nothing is added for what its allocator holds besides.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import measure

COMMON = [
    "model={name: smollm2-135m, positions: extend}", "data={train: pydoc, validation: null}", "eval=null",
    "sample=null",
    "checkpoint.at_end=false", "report=false", "train.steps=1", "train.warmup=0",
]  # fmt: skip
HERE = "exact.offload={activations: none, optimizer: none}"
#: name -> (what it is, tokens of the row, bytes it must stay within, overrides).
STEPS: dict[str, tuple[str, int, float, list[str]]] = {
    "lora-16k-disk": ("LoRA, with a disk", 16384, 2.5e9, ["adapter=lora", "budget=2.5GB"]),
    "lora-16k": ("LoRA, nothing on disk", 16384, 2.8e9, ["adapter=lora", "budget=2.8GB", HERE]),
    "full-8k": ("all weights, nothing on disk", 8192, 3.0e9, ["budget=3GB", HERE]),
    "full-8k-disk": ("all weights, with a disk", 8192, 2.0e9, ["budget=2GB"]),
}
BUDGET = 8.0e9
#: The cut model of the boundary, from scratch, and its budget.
CUT, CUT_BUDGET = 4, "1.3GB"
CHILD = str(Path(__file__).with_name("long_child.py"))


def words_of(seq: int, *more: str) -> list[str]:
    return [*COMMON, f"data.seq_len={seq}", f"train.batch_tokens={seq}", *more]


def base(work: Path, **model: Any) -> Path:
    """A recipe to override; JSON is YAML."""
    work.mkdir(parents=True, exist_ok=True)
    path = work / f"base-{'cut' if model else 'whole'}.yaml"
    named = model or {"name": "smollm2-135m"}
    path.write_text(json.dumps({"model": named, "data": {"train": "pydoc"}, "output": str(work / "run")}), "utf-8")
    return path


def step(name: str, work: Path) -> dict[str, Any]:
    """One real step in a process of its own."""
    _, seq, _, overrides = STEPS[name]
    shutil.rmtree(work / "run", ignore_errors=True)
    words = words_of(seq, *overrides, f"output={work / 'run'}")
    child = measure.watch(measure.skimp("train", str(base(work)), *words), work / f"{name}.txt")
    if child.code:
        return {"failed": child.code, "seconds": child.seconds, "out": child.out[-600:]}
    found = json.loads((work / "run" / "summary.json").read_text("utf-8"))
    metrics = [json.loads(x) for x in (work / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {
        "planned": found["planned_rss_bytes"], "peak": found["rss_peak_bytes"], "baseline": found["rss_baseline_bytes"],
        "tracked": found["measured_peak_bytes"], "simulated": found["planned_peak_bytes"],
        "predicted": found["plan"]["predicted_step_seconds"], "seconds": metrics[-1]["seconds"],
        "loss": metrics[-1]["loss"], "exact": found["plan"]["chosen"],
    }  # fmt: skip


def steps(names: list[str], work: Path, results: measure.Results, source: Any) -> dict[str, Any]:
    rows = {n: results.row(n, [n, STEPS[n], COMMON, source, measure.versions()], partial(step, n, work)) for n in names}
    lines = []
    for name, row in rows.items():
        what, seq, limit, _ = STEPS[name]
        if "failed" in row:
            lines.append([what, f"{seq:,}", f"{limit / 1e9:.1f} GB", f"exit {row['failed']}", *["-"] * 5])
            print(row["out"], file=sys.stderr)
            continue
        kept = "yes" if row["peak"] <= limit else "NO"
        lines.append([
            what, f"{seq:,}", f"{limit / 1e9:.1f} GB", measure.gb(row["planned"]), measure.gb(row["peak"]), kept,
            f"{row['predicted']:.0f}", f"{row['seconds']:.0f}", f"{row['loss']:.3f}",
        ])  # fmt: skip
    heads = ["trained", "tokens", "limit", "planned", "whole process", "within", "predicted s", "s a step", "loss"]
    print(measure.table(heads, lines))
    for name, row in rows.items():
        print(f"  {name}: {json.dumps(row.get('exact', row.get('failed')))}")
    return rows


def longest(work: Path) -> dict[str, Any]:
    """The longest row in 8 GB: skimp's planner, and the plain model's simulated step."""
    found: dict[str, Any] = {}
    ways = {
        "all weights, nothing on disk": [HERE],
        "all weights, with a disk": [],
        "LoRA, with a disk": ["adapter=lora"],
    }
    for way, more in ways.items():
        words = [*words_of(8192, f"budget={BUDGET / 1e9:g}GB", *more), "--largest", "seq", "--json"]
        child = measure.watch(measure.skimp("plan", str(base(work)), *words), work / "largest.txt")
        found[way] = json.loads(child.check(way).out[child.out.index("{") :])["largest"]
    child = measure.watch([sys.executable, CHILD, "plain", f"{BUDGET:.0f}"], work / "plain.txt").check("plain")
    plain = json.loads(child.out[child.out.rindex("{") :])
    print(f"longest row in {BUDGET / 1e9:g} GB of the whole process, SmolLM2-135M, float32, AdamW")
    lines = [["plain Hugging Face", f"{plain['seq']:,}", "1.0"]]
    lines += [[way, f"{seq:,}", f"{seq / plain['seq']:.1f}"] for way, seq in found.items()]
    print(measure.table(["trained", "tokens", "of plain"], lines))
    return {"plain": plain, "skimp": found}


def boundary(work: Path) -> dict[str, Any]:
    """On a model of four of SmolLM2's blocks: the longest row that the plan allows is run, the next is refused."""
    folder = work / "cut"
    measure.watch([sys.executable, CHILD, "cut", str(folder), str(CUT)], work / "cut.txt").check("cut")
    recipe = base(work, name=str(folder), init="scratch")
    common = [o for o in COMMON if not o.startswith("model=")] + [
        "model.positions=extend",
        f"budget={CUT_BUDGET}",
        HERE,
    ]

    def words(seq: int) -> list[str]:
        return [*common, f"data.seq_len={seq}", f"train.batch_tokens={seq}", f"output={work / 'run'}"]

    asked = measure.skimp("plan", str(recipe), *words(1024), "--largest", "seq", "--json")
    child = measure.watch(asked, work / "largest.txt").check("largest")
    most = json.loads(child.out[child.out.index("{") :])["largest"]
    above = measure.watch(measure.skimp("plan", str(recipe), *words(most + 64)), work / "above.txt").code
    shutil.rmtree(work / "run", ignore_errors=True)
    measure.watch(measure.skimp("train", str(recipe), *words(most)), work / "below.txt").check("the step below")
    found = json.loads((work / "run" / "summary.json").read_text("utf-8"))
    peak, planned = found["rss_peak_bytes"], found["planned_rss_bytes"]
    print(f"{CUT} blocks in {CUT_BUDGET}: {most:,} tokens planned at {measure.gb(planned)}, "
          f"run in {measure.gb(peak)}; {most + 64:,} tokens: exit code {above} (3: does not fit)")  # fmt: skip
    return {"tokens": most, "planned": planned, "peak": peak, "above": above}


def main() -> None:
    parser = measure.runs_parser(__doc__, {**STEPS, "none": ()}, "runs/bench-long")
    parser.add_argument("--longest", action="store_true", help="the longest row in 8 GB, by simulation")
    parser.add_argument("--boundary", action="store_true", help="a real step at the longest row of a small model")
    args, names = measure.parsed(parser, {**STEPS, "none": ()})
    work = Path(args.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    results = measure.Results(work / "results.json", args.fresh)
    print(f"SmolLM2-135M, one row, float32\n{measure.machine()}\n")
    rows = steps([n for n in names if n != "none"], work, results, measure.source_digest())
    found = {"steps": rows, "machine": measure.machine()}
    if args.longest:
        found["longest"] = longest(work)
    if args.boundary:
        found["boundary"] = boundary(work)
    measure.write_json(args.json, found)


if __name__ == "__main__":
    main()
