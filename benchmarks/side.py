"""Memory of QST, S2A and coded derivatives beside LoRA's on a 4-bit base, at a long sequence.

    python benchmarks/side.py                # SmolLM2-135M, one row of 4,096 tokens (about two minutes)
    python benchmarks/side.py --seq 2048

Bytes are those a step adds to what is there before the model: weights, states and the fullest moment, by simulation of
the very run; no weight is loaded. Two tables: every activation kept, and every block run again in backward (with the
side network its own blocks, which are all that is kept). Then a model of the same widths cut to `--blocks` blocks takes
real steps with `--steps`, counted by torch's allocator, and must agree to 1 %. Exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from skimp.core.batch import Batch
from skimp.core.exact import ExactChoices
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.data.synthetic import synthetic_batch
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe, resolve_model
from skimp.run.build import build
from skimp.run.weights import init_scratch

QLORA = "qlora, r 16"
ROWS: dict[str, tuple[str, ...]] = {
    QLORA: ("adapter={name: lora, r: 16}", "model.weights=nf4"),
    "qlora, derivatives in 4 bits": ("adapter={name: lora, r: 16}", "model.weights=nf4", "activations.derivative=4"),
    "s2a on nf4": ("adapter={name: s2a}", "model.weights=nf4"),
    "s2a on nf4, derivatives in 4 bits": ("adapter={name: s2a}", "model.weights=nf4", "activations.derivative=4"),
    "qst, adapter:16": ("adapter={name: qst, reduce: 16}", "model.weights=nf4"),
    "qst, avgpool": ("adapter={name: qst, reduce: 16, down: avgpool}", "model.weights=nf4"),
}
#: Row -> the most of QLoRA's bytes that it may take with every activation kept.
GOALS = {"qst, adapter:16": 0.6, "qst, avgpool": 0.6}


def recipe_of(changes: tuple[str, ...], seq: int) -> Any:
    values = {
        "model": "smollm2-135m",
        "data": {"train": "pydoc", "seq_len": seq, "validation": None},
        "output": "runs/side",
        "train": {"steps": 2, "batch_tokens": seq, "clip": 1e-6},
        "eval": None,
    }
    return load_recipe(values, changes)


def table(config: dict[str, Any], seq: int, again: bool) -> dict[str, int]:
    """Row -> bytes of a step, all activations kept or all blocks run again."""
    blocks = tuple(range(int(config["num_hidden_layers"]))) if again else ()
    found = {}
    for row, changes in ROWS.items():
        profile = simulate(recipe_of(changes, seq), ExactChoices(1, recompute=blocks), config)
        found[row] = profile.peak.total
    return found


def printed(found: dict[str, int], title: str) -> None:
    print(f"\n{title}")
    for row, size in found.items():
        print(f"  {row:<36} {size / 1e6:9.1f} MB  {size / found[QLORA]:5.2f}x")


def counted(config: dict[str, Any], seq: int, changes: tuple[str, ...]) -> tuple[int, int, float]:
    """(simulated, allocated) bytes of two steps beyond what rests, and seconds of one, on the cut model."""
    recipe, exact = recipe_of(changes, seq), ExactChoices(1)
    run = build(recipe, exact, config, fill=lambda model: init_scratch(model, 0))
    batch: Batch = synthetic_batch(seq, 1, int(config["vocab_size"]), None, 0)
    tracker = Tracker()
    run.show_to(tracker, batch)
    rest = tracker.live
    begin = time.perf_counter()
    seen = witness(lambda: [run.step(batch) for _ in range(2)] and None)[1]
    seconds = (time.perf_counter() - begin) / 2
    run.close()
    return simulate(recipe, exact, config).peak.total - rest, seen.peak, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", action="store_true", help="take the real steps as well")
    args = parser.parse_args()
    config = dict(resolve_model("smollm2-135m").config)
    missed = []
    kept = table(config, args.seq, again=False)
    printed(kept, f"SmolLM2-135M, 1 x {args.seq} tokens, float32 beside NF4: every activation kept")
    printed(table(config, args.seq, again=True), "every block run again in backward")
    missed += [row for row, goal in GOALS.items() if kept[row] > goal * kept[QLORA]]
    if args.steps:
        cut = {**config, "num_hidden_layers": args.blocks}
        print(f"\nreal steps of {args.blocks} blocks, {torch.get_num_threads()} threads: beyond what rests")
        for row in (QLORA, "s2a on nf4, derivatives in 4 bits", "qst, adapter:16", "qst, avgpool"):
            planned, seen, seconds = counted(cut, args.seq, ROWS[row])
            print(
                f"  {row:<36} {planned / 1e6:9.1f} MB planned, {seen / 1e6:9.1f} MB allocated, {seconds:5.1f} s a step"
            )
            missed += [f"{row}: planned {planned:,}, allocated {seen:,}"] if abs(planned - seen) > 0.01 * seen else []
    for row in missed:
        print(f"missed: {row}", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
