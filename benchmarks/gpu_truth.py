"""The plan against a card: allocated and reserved peaks of real steps, over about twenty configurations.

    python benchmarks/gpu_truth.py                  # on a machine with a CUDA device: at most eight minutes
    python benchmarks/gpu_truth.py --plan h100-80   # anywhere: the planned half of the table, for that card

Every configuration has a process of its own, so that nothing of another is cached: the run is built by skimp's own
`build`, moved to the device, and stepped three times on random tokens. Compared are `max_memory_allocated` and
`max_memory_reserved` of PyTorch with the plan's simulation of the same run. Exit code 1 when a reserved peak was
planned too low. Without a device nothing is measured, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure

SECONDS = 480
STEPS = 3

#: name -> (model, overrides, exact choices, allocator settings). Shapes of 0.1 to 1.3 billion parameters: on every card
#: of 16 GB and up a step takes seconds.
SMALL, MIDDLE = "smollm2-135m", "llama-3.2-1b"
Case = tuple[str, list[str], dict[str, Any], str]


def cases() -> dict[str, Case]:
    """The table's rows."""
    eight, bf16, mixed = "optimizer=adamw8bit", "precision=bf16", "precision=bf16-mixed"
    lora, free = "adapter=lora", "train.clip=null"

    def rows(seq: int, count: int) -> list[str]:
        return [f"data.seq_len={seq}", f"train.batch_tokens={seq * count}"]

    return {
        "fp32": (SMALL, rows(1024, 4), {"micro_rows": 4}, ""),
        "fp32, recompute all": (SMALL, rows(1024, 4), {"micro_rows": 4, "recompute": 30}, ""),
        "fp32, recompute half": (SMALL, rows(1024, 4), {"micro_rows": 4, "recompute": 15}, ""),
        "fp32, four micro-batches": (SMALL, rows(1024, 4), {"micro_rows": 1}, ""),
        "fp32, step in backward": (SMALL, [*rows(1024, 2), free], {"micro_rows": 2, "in_backward": True}, ""),
        "fp32, two passes": (SMALL, rows(1024, 2), {"micro_rows": 2, "in_backward": True}, ""),
        "fp32, 8-bit states": (SMALL, [*rows(1024, 4), eight], {"micro_rows": 4}, ""),
        "fp32, expandable": (SMALL, rows(1024, 4), {"micro_rows": 4}, "expandable_segments:True"),
        "bf16": (SMALL, [*rows(1024, 8), bf16], {"micro_rows": 8}, ""),
        "bf16, long rows": (SMALL, [*rows(8192, 1), bf16], {"micro_rows": 1}, ""),
        "bf16, long rows, recompute all": (SMALL, [*rows(8192, 2), bf16], {"micro_rows": 2, "recompute": 30}, ""),
        "bf16, 8-bit, in backward": (
            SMALL, [*rows(2048, 2), bf16, eight, free], {"micro_rows": 2, "in_backward": True}, "",
        ),
        "bf16-mixed": (SMALL, [*rows(1024, 4), mixed], {"micro_rows": 4}, ""),
        "bf16-mixed, recompute all": (SMALL, [*rows(1024, 8), mixed], {"micro_rows": 8, "recompute": 30}, ""),
        "bf16-mixed, expandable": (SMALL, [*rows(1024, 4), mixed], {"micro_rows": 4}, "expandable_segments:True"),
        "LoRA, bf16": (SMALL, [*rows(1024, 8), bf16, lora], {"micro_rows": 8}, ""),
        "LoRA, bf16, recompute all": (SMALL, [*rows(2048, 8), bf16, lora], {"micro_rows": 8, "recompute": 30}, ""),
        "small chunks of logits": (SMALL, [*rows(1024, 4), bf16], {"micro_rows": 4, "loss_chunk": 256}, ""),
        "split limit of 64 MiB": (SMALL, rows(1024, 4), {"micro_rows": 4}, "max_split_size_mb:64"),
        "one billion, bf16, 8-bit, recompute all": (
            MIDDLE, [*rows(2048, 2), bf16, eight], {"micro_rows": 2, "recompute": 16}, "",
        ),
    }  # fmt: skip


def described(case: Case) -> tuple[Any, dict[str, Any], Any]:
    """(recipe, model config, exact choices) of a row."""
    from skimp.core.exact import ExactChoices
    from skimp.core.structure import layers_of
    from skimp.recipe import load_recipe, resolve_model

    model, overrides, exact, _ = case
    values = {
        "model": model,
        "data": {"train": "pydoc", "packing": False},
        "output": "runs/gpu-truth",
        "train": {"steps": 1},
        "eval": None,
    }
    recipe = load_recipe(values, overrides)
    config = resolve_model(recipe.model).config
    blocks = min(exact.get("recompute", 0), int(config[layers_of(config)]))
    return recipe, config, ExactChoices(**(exact | {"recompute": tuple(range(blocks))}))


def planned(case: Case, card: Any) -> dict[str, Any]:
    """The plan's peaks of a row on `card`."""
    from skimp.core.memory.cuda_settings import read_settings
    from skimp.plan.places import Places
    from skimp.plan.reserve import reserve

    recipe, config, exact = described(case)
    where = Places(card.name, card.budget_bytes, 0, 0, 0, (), card)
    found = reserve(recipe, config, exact, where, read_settings(case[3]), f"cuda:{card.capability}")
    return found.as_dict()


def run_on(case: Case, device: str) -> None:
    """Build the row's run, move it and step it; what a child process does between its two readings."""
    import torch

    from skimp.core.attention import target
    from skimp.core.batch import Batch
    from skimp.run.build import build

    def fill(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)

    recipe, config, exact = described(case)
    capability = "" if device == "cpu" else "{}.{}".format(*torch.cuda.get_device_capability())
    with target(device if device == "cpu" else f"cuda:{capability}"):
        run = build(recipe, exact, config, fill=fill)
        run.model.to(device)
        for state in run.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor)})
        rows, seq = recipe.rows_per_step, recipe.data.seq_len
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, int(config["vocab_size"]), (rows, seq), generator=generator).to(device)
        labels = torch.roll(ids, -1, 1)
        positions = torch.arange(seq, device=device).expand(rows, seq).contiguous()
        source = torch.zeros(rows, dtype=torch.int64, device=device)
        documents = ((0, seq - 1, seq),) * rows
        batch = Batch(ids, labels, positions, documents, rows * seq, source=source)
        for _ in range(STEPS):
            run.step(batch)
        run.close()


def child(name: str) -> None:
    """Run one row on the device and print its peaks as JSON."""
    import torch

    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    begin = time.perf_counter()
    run_on(cases()[name], "cuda")
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    said = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        # What the process takes outside the allocator, if nobody else is on the card.
        "context": total - free - torch.cuda.memory_reserved(),
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps(said))


def measured(name: str, settings: str) -> dict[str, Any]:
    """The child's figures, or what it died of."""
    environment = os.environ | ({"PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {})
    done = subprocess.run(
        [sys.executable, __file__, "--child", name], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def card_here() -> Any:
    """The card of this machine as the plan knows it, with the device's own capability and size."""
    import torch

    from skimp.core.errors import RecipeError
    from skimp.recipe import resolve_gpu

    properties = torch.cuda.get_device_properties(0)
    try:
        card = resolve_gpu(properties.name).card
    except RecipeError:
        card = resolve_gpu(f"{round(properties.total_memory / 2**30)}GB").card
    return replace(card, capability=f"{properties.major}.{properties.minor}", usable_bytes=properties.total_memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", metavar="CARD", help="no device: plan for this card and print the planned half")
    parser.add_argument("--only", help="rows whose name has this in it")
    parser.add_argument("--json", help="write the figures here as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    import torch

    here = torch.cuda.is_available()
    if not here and args.plan is None:
        print("no CUDA device here: nothing measured (--plan CARD prints what would be expected of one)")
        return
    from skimp.recipe import resolve_gpu

    card = resolve_gpu(args.plan).card if args.plan else card_here()
    begin, rows = time.perf_counter(), []
    for name, case in cases().items():
        if args.only and args.only not in name:
            continue
        if time.perf_counter() - begin > SECONDS - 30:
            print(f"left out after {SECONDS - 30} s: {name} and what follows", file=sys.stderr)
            break
        row = {"name": name, "model": case[0], "plan": planned(case, card)}
        rows.append(row | ({} if args.plan else {"card": measured(name, case[3])}))
    report(rows, card, bool(args.plan), args.json)


def report(rows: list[dict[str, Any]], card: Any, only_planned: bool, json_path: str | None) -> None:
    """The table, what it means, and the exit code."""
    print(f"{card.name}, capability {card.capability}; GB = 10⁹ bytes\n")
    head = ["configuration", "planned allocated", "reserved", "retries"]
    lines = [
        [r["name"], measure.gb(r["plan"]["allocated_bytes"]), measure.gb(r["plan"]["reserved_bytes"]),
         str(r["plan"]["retries"])]
        for r in rows
    ]  # fmt: skip
    low: list[str] = []
    if not only_planned:
        head += ["measured allocated", "error", "reserved", "error", "context", "seconds"]
        for line, row in zip(lines, rows, strict=True):
            found, plan = row["card"], row["plan"]
            if "failed" in found:
                line += [found["failed"], "", "", "", "", ""]
                low.append(row["name"])
                continue
            errors = [plan[f"{kind}_bytes"] / found[kind] - 1 for kind in ("allocated", "reserved")]
            low += [row["name"]] if errors[1] < 0 else []
            line += [measure.gb(found["allocated"]), f"{errors[0]:+.1%}", measure.gb(found["reserved"]),
                     f"{errors[1]:+.1%}", measure.gb(found["context"]), f"{found['seconds']:.1f}"]  # fmt: skip
    print(measure.table(head, lines))
    if low:
        print("\nfailed, or reserved more than planned: " + ", ".join(low))
    measure.write_json(json_path, {"rows": rows, "card": card.name, "machine": measure.machine()})
    sys.exit(1 if low else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
