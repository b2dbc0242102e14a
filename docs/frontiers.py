"""The frontiers of these pages: memory against time, as SVG in `images/`. No run is needed; `make pictures` calls it.

SmolLM2-135M on this machine's CPU at three budgets (seconds are this machine's), and Llama-3-8B with LoRA on four cards
(seconds from the card table).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import skimp
from skimp.core.memory.process import set_malloc_policy
from skimp.report.frontiers import frontiers_svg

IMAGES = Path(__file__).with_name("images")
BUDGETS = ("2.5GB", "2.8GB", "3.4GB")
#: Cards, and what a recipe needs to fit the smallest.
CARDS: dict[str, tuple[str, ...]] = {
    "16GB": ("model.weights=nf4",), "24GB": (), "48GB": (), "80GB": (),
}  # fmt: skip


def recipe(model: str, seq: int, **more: Any) -> dict[str, Any]:
    """Four rows of `seq` tokens a step."""
    data = {"train": "pydoc", "seq_len": seq}
    return {"model": model, "data": data, "output": "runs/plan", "train": {"steps": 1, "batch_tokens": 4 * seq}, **more}


def smollm2() -> str:
    described = recipe("smollm2-135m", 512)
    plans = [skimp.plan(described, f"budget={size}").as_dict() for size in BUDGETS[:-1]]
    plans.append(skimp.plan(described, f"budget={BUDGETS[-1]}", also=("frontier",)).as_dict())
    for plan in plans:
        plan["frontier"] = plans[-1]["frontier"]  # it does not depend on the budget
    title = "SmolLM2-135M, all weights, 4 rows of 512 tokens, on a CPU"
    return frontiers_svg(plans, title, [f"budget {size}" for size in BUDGETS])


def llama() -> str:
    # One row at a time and gradients held: of an adapter they are small, and the curve is the recompute's.
    pins = {"micro_batch": 1, "in_backward": False}
    described = recipe("llama-3-8b", 4096, precision="bf16", adapter="lora", exact=pins)
    plans = [skimp.plan(described, *more, gpu=card, also=("frontier",)) for card, more in CARDS.items()]
    names = [f"{card}{', base in NF4' if more else ''}" for card, more in CARDS.items()]
    title = "Llama-3-8B, LoRA on a base in bf16, 4 rows of 4,096 tokens"
    return frontiers_svg([plan.as_dict() for plan in plans], title, names)


def main(asked: list[str]) -> None:
    set_malloc_policy()
    IMAGES.mkdir(exist_ok=True)
    for name, make in (("smollm2", smollm2), ("llama", llama)):
        if not asked or name in asked:
            path = IMAGES / f"frontier-{name}.svg"
            path.write_text(make(), "utf-8")
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
