"""What initialising each adapter takes at its peak, against the result and one layer: the allocator's own events.

    python benchmarks/initial.py                    # every adapter on SmolLM2-135M in float32 and in NF4 (minutes)
    python benchmarks/initial.py --only pissa loftq

Loading is part of it: storage, weights from their file tensor by tensor, encoding, then the additions. Counted are
bytes of c10's CPU allocator from zero, so that neither the file cache nor the profiler's own memory is in them. *Above*
is the peak less the result, held against the largest linear layer and the largest tensor of all (the embedding) in
float32. Each row has a process of its own. Exit code 1 where more than the result and one tensor was held, and more
than the adapter's own statement (`Handle.peaks`, which plans count).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure
from skimp.core.coded_model import encode_model
from skimp.core.memory.oracle import witness
from skimp.core.registry import methods
from skimp.core.structure import read_structure
from skimp.core.units import format_bytes
from skimp.recipe import fetch_model, load_recipe, resolve_model
from skimp.run.adapt import adapt, coders
from skimp.run.build import DTYPES
from skimp.run.coded_base import weight_codec
from skimp.run.skeleton import materialise, skeleton
from skimp.run.weights import load_weights

MODEL = "smollm2-135m"
#: What an adapter is asked for beside its defaults: a test's model has few heads.
ASKED: dict[str, dict[str, Any]] = {}


def cases() -> dict[str, dict[str, Any]]:
    """Row -> `adapter:` of the recipe; "none" is the base alone."""
    names = [name for name, known in methods().items() if known.kind == "adapter"]
    named: dict[str, Any] = {name: {"name": name, **ASKED.get(name, {})} for name in names}
    named["lora, init: pissa-fast"] = {"name": "lora", "init": "pissa-fast"}
    named["s2ft, select: weight"] = {**named["s2ft"], "select": "weight", "o": 0.25}
    return {"none": None, **named}


def goes(adapter: dict[str, Any] | None, codec: str | None) -> bool:
    """Whether the adapter takes a base of this kind."""
    if adapter is None:
        return True
    known = methods()[adapter["name"]]
    return codec not in known.conflicts if codec is not None else not known.needs


def initialised(
    adapter: dict[str, Any] | None, codec: str | None, config: dict[str, Any], weights: Path
) -> dict[str, int]:
    """Bytes of the result, of the peak and of what the plan states above the result."""
    model = {"name": MODEL, **({} if codec is None else {"weights": codec})}
    train = {"steps": 1, "batch_tokens": 64}
    data = {"train": "pydoc", "seq_len": 64, "validation": None}
    values = {"model": model, "data": data, "train": train, "output": "runs/initial", "eval": None}
    # Codes are frozen: the base alone is measured as if an adapter were to come.
    recipe = load_recipe({**values, "adapter": adapter or "lora"})
    dtype, kept = DTYPES[recipe.precision], weight_codec(recipe)

    def begin() -> Any:
        built = skeleton(dict(config), dtype)
        structure = read_structure(built)
        if kept is not None:
            encode_model(built, structure, kept, coders(recipe, built, structure, kept))
        materialise(built, dtype, _empty)
        load_weights(built, weights)
        return built, None if adapter is None else adapt(built, structure, recipe)

    gc.collect()
    (built, handle), seen = witness(begin)
    del built
    named = {n: p.numel() for n, p in skeleton(dict(config), dtype).named_parameters()}
    return {
        "result": seen.held,
        "peak": seen.peak,
        "above": seen.peak - seen.held,
        "stated": 0 if handle is None else max(handle.peaks().values(), default=0),
        "layer": 4 * max(size for n, size in named.items() if n.endswith("proj.weight")),
        "tensor": 4 * max(named.values()),
    }


def _empty(shape: Any, kind: Any) -> Any:
    import torch

    return torch.empty(shape, dtype=kind)


def child(case: str, codec: str | None) -> None:
    source = fetch_model(resolve_model(load_recipe({"model": MODEL, "data": {"train": "pydoc"}, "output": "x"}).model))
    assert source.weights is not None
    print(json.dumps(initialised(cases()[case], codec, source.config, source.weights)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="rows, by the name of the adapter")
    parser.add_argument("--base", nargs="+", choices=("float32", "nf4"), default=["float32", "nf4"])
    parser.add_argument("--json", help="write the figures here as well")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], None if args.child[1] == "float32" else args.child[1])
        return 0
    print(f"{measure.machine()}\n")
    print(f"{'adapter':<24} {'base':<8} {'result':>9} {'peak':>9} {'above':>9}  above / layer  above / tensor")
    found: dict[str, dict[str, int]] = {}
    missed = []
    for codec in args.base:
        for case, adapter in cases().items():
            if (args.only and case.partition(",")[0] not in args.only) or not goes(
                adapter, None if codec == "float32" else codec
            ):
                continue
            done = subprocess.run(
                [sys.executable, __file__, "--child", case, codec], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            row = json.loads(done.stdout.splitlines()[-1])
            found[f"{case} on {codec}"] = row
            sizes = " ".join(f"{format_bytes(row[k]):>9}" for k in ("result", "peak", "above"))
            by = f"{row['above'] / row['layer']:>13.2f} {row['above'] / row['tensor']:>15.2f}"
            print(f"{case:<24} {codec:<8} {sizes} {by}", flush=True)
            if row["above"] > max(row["tensor"], row["stated"]):
                missed.append(f"{case} on {codec}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("\n" + (f"more than the result and one tensor: {', '.join(missed)}" if missed else "all within one tensor"))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
