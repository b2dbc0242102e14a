"""LoRA in skimp against PEFT with Hugging Face `Trainer`: one adapter to start from, the same rows, clipping,
schedule and float32 AdamW; and QLoRA, the same adapter on a base in NF4.

    python benchmarks/lora.py  # all rows, one after the other on this machine (about five minutes)
    python benchmarks/lora.py --interleave 2  # two rounds in alternating order
    python benchmarks/lora.py --steps 3 --seq 64  # smoke

SmolLM2-135M (real weights), rank 16 on all 210 linear layers, 2,048 tokens a step. Every row is a process of its own;
memory is the highest resident set of that whole process, speed the median step from the third on. skimp's budget is a
share of PEFT's best-memory row, or of its default row where that is less.
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar

import hf
import measure
from hf_work import recipe

DEFAULT, BEST, OURS = "PEFT + Trainer, default", "PEFT + Trainer, best memory", "skimp, LoRA"
#: The same adapter on a base in NF4: other numbers, so its losses are its own.
CODED = "skimp, QLoRA (nf4)"
LR = 2e-4


class LoraBench(hf.Bench):
    """The rows of `hf.Bench`, each with the same adapter."""

    settings: ClassVar = {DEFAULT: hf.SETTINGS[hf.DEFAULT], BEST: hf.SETTINGS[hf.BEST]}
    best = BEST

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.job |= {"adapter": str(self.work / "adapter-r16"), "lr": LR}

    def prepare(self) -> None:
        super().prepare()
        self._child("adapter", self.job)

    def recipe(self, name: str, **changes: Any) -> dict[str, Any]:
        if name == CODED:
            changes["model"] = {"name": self.job["model"], "weights": "nf4"}
        return recipe(self.job, adapter={"from": self.job["adapter"]}, report=False, **changes)


def rounds(bench: LoraBench) -> list[dict[str, dict[str, Any]]]:
    """All rows, as often as asked; every other round backwards."""
    found: list[dict[str, dict[str, Any]]] = []
    budget: int | None = None
    for turn in range(bench.args.interleave):
        this: dict[str, dict[str, Any]] = {}
        names = (DEFAULT, BEST, OURS, CODED)
        for name in names if turn % 2 == 0 else reversed(names):
            this[name] = bench.row(name, turn, budget if name in (OURS, CODED) else None)
            if name == BEST and budget is None:
                of_default, of_best = bench.args.fractions
                budget = int(min(of_default * this[DEFAULT]["peak"], of_best * this[BEST]["peak"]))
        found.append(this)
    return found


def report(found: list[dict[str, dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    """Print the table and the claims; return them as plain values."""
    lines, plain = [], {}
    for name in found[0]:
        rows = [r[name] for r in found if "refused" not in r[name]]
        if not rows:
            lines.append([name, *["–"] * 6, found[0][name]["refused"]])
            continue
        pairs = [(a, b) for r in found for a, b in zip(r[name]["losses"], r[DEFAULT]["losses"], strict=False)]
        p = plain[name] = {
            "peak": measure.middle([r["peak"] for r in rows]),
            "above_baseline": measure.middle([r["peak"] - r["baseline"] for r in rows]),
            "tokens_per_second": measure.middle([r["tokens_per_second"] for r in rows]),
            "memory_to_default": hf.ratio(found, "peak", name, DEFAULT),
            "memory_to_best": hf.ratio(found, "peak", name, BEST),
            "speed_to_default": hf.ratio(found, "tokens_per_second", name, DEFAULT),
            "speed_to_best": hf.ratio(found, "tokens_per_second", name, BEST),
            "loss_difference": max(abs(a - b) for a, b in pairs),
            "losses": rows[0]["losses"],
            "budget": rows[0].get("budget"),
            "how": rows[0]["how"],
        }
        budget = f"budget {measure.gb(p['budget'])}: " if p["budget"] else ""
        lines.append([
            name, measure.gb(p["peak"]), measure.gb(p["above_baseline"]),
            f"{p['memory_to_default']:.3f} / {p['memory_to_best']:.3f}", f"{p['tokens_per_second']:.1f}",
            f"{p['speed_to_default']:.2f} / {p['speed_to_best']:.2f}", f"{p['loss_difference']:.1e}", budget + p["how"],
        ])  # fmt: skip
    head = ["row", "peak", "above baseline", "× default / best", "tokens/s", "× default / best", "|Δ loss|", "how"]
    times = sorted(r["when"] for turn in found for r in turn.values())
    print(
        f"SmolLM2-135M, LoRA r 16 on all linear layers, sequence {args.seq}, {hf.ROWS * args.seq} tokens a step, "
        f"{args.steps} steps ({BEST}: {min(args.steps, args.best_steps)}), {len(found)} round(s), "
        f"measured from {times[0]} to {times[-1]}\n{measure.machine()}\n"
    )
    print(measure.table(head, lines))
    ours, coded, nan = plain.get(OURS, {}).get, plain.get(CODED, {}).get, float("nan")
    said, good = measure.verdicts([
        ("losses equal PEFT's", ours("loss_difference", nan), "<=", 1e-4),
        ("memory to PEFT's default", ours("memory_to_default", nan), "<=", 0.25),
        ("memory to PEFT's best", ours("memory_to_best", nan), "<=", 0.60),
        ("speed to PEFT's default", ours("speed_to_default", nan), ">=", 0.90),
        ("QLoRA: memory to LoRA's", coded("peak", nan) / ours("peak", nan), "<=", 1.0),
        ("QLoRA: largest difference of losses", coded("loss_difference", nan), "<=", 0.5),
    ])  # fmt: skip
    print("\n" + "\n".join(said))
    return {"rows": plain, "verdicts": said, "met": good, "machine": measure.machine(), "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of a row")
    parser.add_argument("--best-steps", type=int, default=5, help="steps of PEFT's slow best-memory row")
    parser.add_argument("--seq", type=int, default=512, help="tokens in a row")
    parser.add_argument("--interleave", type=int, default=1, metavar="N", help="rounds, in alternating order")
    parser.add_argument("--fractions", type=float, nargs=2, default=(0.245, 0.605), metavar=("D", "B"),
                        help="skimp's budget: parts of PEFT's default and best peak, the smaller counts")  # fmt: skip
    parser.add_argument("--work", default="runs/bench-hf", help="folder of the model, the text and finished rows")
    parser.add_argument("--fresh", action="store_true", help="forget finished rows")
    parser.add_argument("--reuse-hf", action="store_true", help="PEFT's rows may be of an earlier skimp's run")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    bench = LoraBench(args)
    bench.prepare()
    found = report(rounds(bench), args)
    measure.write_json(args.json, found)


if __name__ == "__main__":
    main()
