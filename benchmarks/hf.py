"""skimp against Hugging Face `Trainer`: the same weights, rows, clipping, schedule and float32 AdamW.

    python benchmarks/hf.py  # all rows, one after the other on this machine (about an hour)
    python benchmarks/hf.py --interleave 3  # three rounds in alternating order, for machines that drift
    python benchmarks/hf.py --steps 3 --seq 64 --fractions 0.9 1.0        # smoke

SmolLM2-135M (real weights), the Python language reference, 2,048 tokens a step. Every row is a process of
its own. Memory is the highest resident set of that whole process, import and planning included; speed is
the median step from the third on. Finished rows are kept: a killed benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import measure
from hf_work import recipe

DEFAULT, BEST = "HF Trainer, default", "HF Trainer, best memory"
TIGHT, WIDE, EIGHT = "skimp (a)", "skimp (b)", "skimp, 8-bit AdamW"
#: Batch 4 as it comes, and the least memory for the same mathematics: one row at a time, every block
#: recomputed.
SETTINGS = {
    DEFAULT: {"per_device_train_batch_size": 4},
    BEST: {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
        "optim": "adamw_torch_fused",
    },
}  # fmt: skip
ROWS = 4
#: The first step allocates; skimp's second is watched by its own tracker. From the third on the state is
#: steady.
WARM = 2


class Bench:
    """The rows of one command line.

    Attributes:
        settings: the rival's rows, with what they change of `TrainingArguments`.
        best: which of them is its best-memory row, run for fewer steps.
    """

    settings: ClassVar[Mapping[str, dict[str, Any]]] = SETTINGS
    best = BEST

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work).resolve()
        name = f"{args.seq}-{args.steps}"
        self.job: dict[str, Any] = {
            "model": str(self.work / "smollm2-135m-fp32"), "text": str(self.work / f"text-{name}.jsonl"),
            "ids": str(self.work / f"ids-{name}.npy"), "output": str(self.work / "out"), "seq": args.seq,
            "steps": args.steps, "rows": ROWS,
        }  # fmt: skip
        self.results = measure.Results(self.work / "results.json", args.fresh)
        self.source = measure.source_digest()

    def prepare(self) -> None:
        """Model folder, text and ids; seconds when they are there."""
        key = ["prepare", self.job, self.source]
        if self.results.get(key) is None or not Path(self.job["ids"]).is_file():
            self._child("prepare", self.job)
            self.results.put(key, True)

    def row(self, name: str, turn: int, budget: int | None = None) -> dict[str, Any]:
        """Run or recall one row of one round.

        A stored row counts for the skimp it was run beside only: machines drift, and a ratio of two days is
        none. `--reuse-hf` takes HF's rows all the same, for work on skimp between two real measurements.
        """
        rival = name in self.settings
        key: list[Any] = [name, turn, self.job, measure.versions(), WARM]
        key += [self.settings[name], self._steps(name)] if rival else [budget]
        found = self.results.get(key)
        beside = found is not None and (found.get("source") == self.source or (rival and self.args.reuse_hf))
        if not beside:
            print(f"round {turn + 1}: {name} …", file=sys.stderr, flush=True)
            found = self._trainer(name) if rival else self._skimp(name, budget)
            when = datetime.datetime.now().isoformat(" ", "minutes")
            found = self.results.put(key, {**found, "source": self.source, "when": when})
        return dict(found)

    def _steps(self, name: str) -> int:
        steps: int = self.args.steps
        return min(steps, self.args.best_steps) if name == self.best else steps

    def _trainer(self, name: str) -> dict[str, Any]:
        out = self.work / "trainer.json"
        job = {**self.job, "out": str(out), "settings": self.settings[name], "run_steps": self._steps(name)}
        child = self._child("trainer", job)
        found = json.loads(out.read_text("utf-8"))
        return self._measured(child.peak, found["baseline"], found["losses"], found["seconds"], "")

    def _skimp(self, name: str, budget: int | None) -> dict[str, Any]:
        output = self.work / "run"
        shutil.rmtree(output, ignore_errors=True)
        words = self.recipe(name, output=str(output), budget=budget)
        path = self.work / "recipe.yaml"
        path.write_text(json.dumps(words), "utf-8")  # JSON is YAML
        child = measure.watch(measure.skimp("train", str(path)), self.work / "log.txt")
        if child.code == 3:
            return {"refused": next((x for x in child.out.splitlines() if x.startswith("skimp: ")), child.out[-300:])}
        child.check(name)
        summary = json.loads((output / "summary.json").read_text("utf-8"))
        steps = [json.loads(x) for x in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
        chosen = summary["plan"]["chosen"]
        how = f"micro-batch {chosen['micro_rows']}, recompute {len(chosen['recompute'])}"
        how += ", in backward" if chosen["in_backward"] else ""
        found = self._measured(
            child.peak,
            summary["rss_baseline_bytes"],
            [s["loss"] for s in steps],
            [s["seconds"] for s in steps],
            how,
        )
        return {**found, "budget": budget, "planned": summary["planned_rss_bytes"]}

    def recipe(self, name: str, **changes: Any) -> dict[str, Any]:
        """The recipe of a row of skimp's."""
        return recipe(self.job, optimizer="adamw8bit" if name == EIGHT else "adamw", **changes)

    def _measured(
        self, peak: int, baseline: int, losses: list[float], seconds: list[float], how: str
    ) -> dict[str, Any]:
        steady = seconds[WARM:] or seconds[-1:]
        speed = ROWS * self.args.seq / measure.middle(steady)
        return {
            "peak": peak, "baseline": baseline, "tokens_per_second": speed, "losses": losses,
            "seconds": seconds, "how": how,
        }  # fmt: skip

    def _child(self, kind: str, job: dict[str, Any]) -> measure.Child:
        return child(kind, job, self.work)


def child(kind: str, job: dict[str, Any], work: Path) -> measure.Child:
    """One process of `hf_work.py`, to its end."""
    path = work / f"{kind}-job.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(job), "utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    argv = [sys.executable, str(measure.ROOT / "benchmarks" / "hf_work.py"), kind, str(path)]
    return measure.watch(argv, work / "log.txt", offline).check(kind)


def rounds(bench: Bench) -> list[dict[str, dict[str, Any]]]:
    """All rows, as often as asked; every other round backwards, so that a drift of the machine
    favours nobody.
    """
    names = [DEFAULT, TIGHT, WIDE, BEST, EIGHT]
    budgets: dict[str, int] = {}
    found = []
    for turn in range(bench.args.interleave):
        this: dict[str, dict[str, Any]] = {}
        for name in names if turn % 2 == 0 else names[::-1]:
            this[name] = bench.row(name, turn, budgets.get(name))
            if name == DEFAULT and turn == 0:
                small, large = bench.args.fractions
                peak = this[name]["peak"]
                budgets = {
                    TIGHT: int(small * peak),
                    WIDE: int(large * peak),
                    EIGHT: bench.args.quickstart_budget,
                }
        found.append(this)
    return found


def ratio(found: list[dict[str, dict[str, Any]]], key: str, over: str, under: str) -> float:
    """Median over rounds of `over`'s figure / `under`'s, both of the same round; NaN where a row was
    refused.
    """
    pairs = [(r[over].get(key), r[under].get(key)) for r in found]
    return measure.middle([a / b for a, b in pairs if a and b])


def apart(found: list[dict[str, dict[str, Any]]], name: str) -> float:
    """Largest difference of a step's loss from HF Trainer's default row, over all rounds; NaN of no
    common step.
    """
    pairs = [(a, b) for r in found for a, b in zip(r[name].get("losses", []), r[DEFAULT]["losses"], strict=False)]
    return max((abs(a - b) for a, b in pairs), default=float("nan"))


def report(found: list[dict[str, dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Print the table and the claims; return them as plain values."""
    lines, plain = [], {}
    for name in found[0]:
        rows = [r[name] for r in found if "refused" not in r[name]]
        if not rows:
            lines.append([name, *["–"] * 7, found[0][name]["refused"]])
            continue
        peak, speed = (measure.middle([r[k] for r in rows]) for k in ("peak", "tokens_per_second"))
        above = measure.middle([r["peak"] - r["baseline"] for r in rows])
        plain[name] = {
            "peak": peak, "above_baseline": above, "tokens_per_second": speed, "losses": rows[0]["losses"],
            "memory_to_default": ratio(found, "peak", name, DEFAULT),
            "memory_to_best": ratio(found, "peak", name, BEST),
            "speed_to_default": ratio(found, "tokens_per_second", name, DEFAULT),
            "speed_to_best": ratio(found, "tokens_per_second", name, BEST),
            "loss_difference": apart(found, name), "budget": rows[0].get("budget"), "how": rows[0]["how"],
        }  # fmt: skip
        p = plain[name]
        budget = f"budget {measure.gb(p['budget'])}: " if p["budget"] else ""
        lines.append([
            name, measure.gb(peak), measure.gb(above),
            f"{p['memory_to_default']:.3f}", f"{p['memory_to_best']:.3f}", f"{speed:.1f}",
            f"{p['speed_to_default']:.2f} / {p['speed_to_best']:.2f}",
            f"{p['loss_difference']:.1e}", budget + p["how"],
        ])  # fmt: skip
    head = [
        "row",
        "peak",
        "above baseline",
        "× default",
        "× best",
        "tokens/s",
        "× default / best",
        "|Δ loss|",
        "how",
    ]
    times = sorted(r["when"] for turn in found for r in turn.values())
    print(
        f"SmolLM2-135M, sequence {args.seq}, {ROWS * args.seq} tokens a step, {args.steps} steps "
        f"({BEST}: {min(args.steps, args.best_steps)}), {len(found)} round(s), "
        f"measured from {times[0]} to {times[-1]}\n{measure.machine()}\n"
    )
    print(measure.table(head, lines))
    nothing: dict[str, Any] = {}
    a, b, eight = (plain.get(name, nothing).get for name in (TIGHT, WIDE, EIGHT))
    nan = float("nan")
    said, good = measure.verdicts([
        ("losses of (a) equal HF's", a("loss_difference", nan), "<=", 1e-4),
        ("losses of (b) equal HF's", b("loss_difference", nan), "<=", 1e-4),
        ("(a) memory to HF default", a("memory_to_default", nan), "<=", 0.42),
        ("(a) speed to HF default", a("speed_to_default", nan), ">=", 0.92),
        ("(b) memory to HF default", b("memory_to_default", nan), "<=", 0.60),
        ("(b) speed to HF default", b("speed_to_default", nan), ">=", 1.05),
        ("(a) memory to HF best", a("memory_to_best", nan), "<=", 0.85),
        ("(a) speed to HF best", a("speed_to_best", nan), ">=", 1.3),
        ("8-bit: peak in GB", eight("peak", nan) / 1e9, "<=", args.quickstart_budget / 1e9),
    ])  # fmt: skip
    print("\n" + "\n".join(said))
    return {"rows": plain, "verdicts": said, "met": good, "machine": measure.machine(), "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a row")
    parser.add_argument("--best-steps", type=int, default=6, help="steps of HF's slow best-memory row")
    parser.add_argument("--seq", type=int, default=512, help="tokens in a row")
    parser.add_argument("--interleave", type=int, default=1, metavar="N", help="rounds, in alternating order")
    parser.add_argument("--fractions", type=float, nargs=2, default=(0.42, 0.60), metavar=("A", "B"),
                        help="budgets of skimp (a) and (b), as parts of HF default's peak")  # fmt: skip
    parser.add_argument("--quickstart-budget", type=int, default=2_000_000_000, help="bytes of the 8-bit row")
    parser.add_argument("--work", default="runs/bench-hf", help="folder of the model, the text and finished rows")
    parser.add_argument("--fresh", action="store_true", help="forget finished rows")
    parser.add_argument("--reuse-hf", action="store_true", help="HF's rows may be of an earlier skimp's run")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    bench = Bench(args)
    bench.prepare()
    found = report(rounds(bench), args)
    measure.write_json(args.json, found)


if __name__ == "__main__":
    main()
