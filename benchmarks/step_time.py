"""Predicted against measured seconds of a step, over points of the memory-time frontier of one model.

    python benchmarks/step_time.py            # a few minutes; leave the machine alone meanwhile
    python benchmarks/step_time.py --blocks 2 --seq 64 --steps 1 --points 2

The points are those of the search's own frontier and of every micro-batch beside it (a frontier alone has few seconds
between its ends), chosen to lie evenly between the fastest and the slowest prediction: none is a tie by prediction, and
all of them count in the rank correlation. One process builds the model once and goes from point to point by
`Run.rebuild`; each point takes one step to warm up and `--steps` that count (the fastest of them: what else ran on the
machine only adds). Predictions are made before, from the probe's rates alone. Exit code 1 when the median error is
above 25 % or the rank correlation below 0.9.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from typing import Any

import measure
from skimp.core.exact import ExactChoices
from skimp.core.lean import stay_lean
from skimp.core.memory.process import set_malloc_policy

ROWS = 4
#: Points that are predicted nearer to each other than such a part of an even step would be ties, and are left out.
APART = 0.5


def spread(points: list[Any], count: int) -> list[Any]:
    """At most `count` of the points, from the fastest to the slowest in even steps of predicted `seconds`.

    Of each step the nearest point, unless it lies nearer than half a step to the one before: order among ties is luck,
    and says nothing of a prediction.
    """
    ordered = sorted(points, key=lambda p: p.seconds)
    low, high = ordered[0].seconds, ordered[-1].seconds
    step = (high - low) / max(1, count - 1)
    found = [ordered[0]]
    for n in range(1, count):
        nearest = min(ordered, key=lambda p: abs(p.seconds - low - n * step))
        if nearest.seconds - found[-1].seconds >= APART * step > 0:
            found.append(nearest)
    return found


def ranks(values: list[float]) -> list[float]:
    """Rank of each value; there are no ties among measured times."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [float(order.index(i)) for i in range(len(values))]


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: Pearson's over the ranks."""
    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    above = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    return above / sum((p - mean) ** 2 for p in x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of the model that are kept")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a row; a step is four rows")
    parser.add_argument("--steps", type=int, default=2, help="steps of each point that count")
    parser.add_argument("--points", type=int, default=10, help="points of the frontier, at most")
    parser.add_argument("--optimizer", default="adamw", help="update rule")
    parser.add_argument("--shared", action="store_true", help="processor seconds of one thread: for a machine in use")
    parser.add_argument("--json", help="write the figures here as well")
    args = parser.parse_args()
    stay_lean()
    set_malloc_policy()
    import torch

    from skimp.core.memory.process import Policy
    from skimp.core.structure import layers_of
    from skimp.data.synthetic import synthetic_batch
    from skimp.kernels.native import pool
    from skimp.plan.frontier import Point, frontier
    from skimp.plan.mixed import MixedSearch
    from skimp.plan.places import Places
    from skimp.plan.probe import probe
    from skimp.plan.simulate import simulate
    from skimp.recipe import load_recipe, resolve_model
    from skimp.run.build import build
    from skimp.run.weights import init_scratch

    recipe = load_recipe({
        "model": {"name": args.model, "init": "scratch"}, "output": "runs/step-time", "eval": None,
        "data": {"train": "pydoc", "seq_len": args.seq, "packing": False, "validation": None},
        "train": {"steps": 1, "batch_tokens": ROWS * args.seq, "clip": 1e-3}, "optimizer": args.optimizer,
    })  # fmt: skip
    config = dict(resolve_model(recipe.model).config)
    config[layers_of(config)] = args.blocks
    clock = time.process_time if args.shared else time.perf_counter
    if args.shared:
        torch.set_num_threads(1)
    rates = probe(recipe, config, clock)
    policy: Policy = "pool" if pool.available() else "return"
    here = Places("cpu", 10**12, 10**12, 10**12, 0, ())
    search = MixedSearch(
        recipe, config, args.blocks, {policy: (10**12, 0.0 if policy == "pool" else 1.0)}, rates, "cpu"
    )
    offered = list(frontier(search, here))
    for micro in search.lattice.sizes():
        for again in ((), tuple(range(args.blocks))):
            profile = search.full(ExactChoices(micro, again, malloc=policy), short=True)
            offered.append(Point(profile.exact, profile.peak_bytes, profile.seconds))
    lattice = [point.exact for point in spread(offered, args.points)]
    one = (0, args.seq)
    planned = [simulate(recipe, exact, config, rates=rates, steps=1, documents=one) for exact in lattice]
    if pool.available():
        pool.install(max(p.peak_bytes for p in planned) + (32 << 20))
    run = build(recipe, lattice[0], config, fill=lambda model: init_scratch(model, 0))
    batch = synthetic_batch(args.seq, ROWS, config["vocab_size"], None)
    rows: list[dict[str, Any]] = []
    for exact, profile in zip(lattice, planned, strict=True):
        run.rebuild(exact)
        spent = []
        for _ in range(args.steps + 1):
            start = clock()
            run.step(batch)
            spent.append(clock() - start)
        rows.append({
            "way": exact.describe(args.blocks, ROWS), "peak": profile.peak_bytes,
            "predicted": profile.seconds, "measured": min(spent[1:]),
        })  # fmt: skip
        print(rows[-1], flush=True)
    head = ["point", "planned peak", "predicted", "measured", "error"]
    lines = [
        [r["way"], measure.gb(r["peak"]), f"{r['predicted']:.2f} s", f"{r['measured']:.2f} s",
         f"{r['predicted'] / r['measured'] - 1:+.0%}"]
        for r in rows
    ]  # fmt: skip
    print(
        f"{args.model} cut to {args.blocks} blocks, {ROWS} rows of {args.seq} tokens, {args.optimizer}, {policy}"
        f"{', processor seconds of one thread' if args.shared else ''}"
    )
    print(f"{measure.machine()}\n{rates}\n")
    print(measure.table(head, lines))
    errors = [abs(r["predicted"] / r["measured"] - 1) for r in rows]
    seconds = sorted(r["predicted"] for r in rows)
    print(
        f"\n{len(rows)} of {len(offered)} points, predicted {seconds[0]:.2f} to {seconds[-1]:.2f} s, the nearest two "
        f"{min((b / a - 1 for a, b in pairwise(seconds)), default=0.0):.1%} apart; all are in the rank correlation"
    )
    rank = correlation([r["predicted"] for r in rows], [r["measured"] for r in rows])
    claims = [("median error", measure.middle(errors), "<=", 0.25), ("rank correlation", rank, ">=", 0.9)]
    said, good = measure.verdicts(claims)
    print("\n" + "\n".join(said))
    measure.write_json(args.json, {"rows": rows, "verdicts": said, "machine": measure.machine()})
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
