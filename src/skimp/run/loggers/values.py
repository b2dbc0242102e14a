"""What loggers are told: names and numbers, from the rows of metrics.jsonl and evals.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Keys of a row of metrics.jsonl and the names they have in a logger. Memory is in GB, 10⁹ bytes, as skimp prints it.
TRAINING = {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm",
            "tokens_per_second": "train/tokens_per_second"}  # fmt: skip
MEMORY = {"memory_bytes": "memory_gb/now", "memory_peak_bytes": "memory_gb/peak"}


def of_step(row: Mapping[str, Any], limits: Mapping[str, int | None]) -> dict[str, float]:
    """Named values of one optimizer step.

    Args:
        row: of metrics.jsonl.
        limits: `planned` and `budget` in bytes, None where there is none: drawn beside the memory in use.
    """
    found = {name: float(row[key]) for key, name in TRAINING.items() if _number(row.get(key))}
    found |= {name: row[key] / 1e9 for key, name in MEMORY.items() if _number(row.get(key))}
    return found | {f"memory_gb/{name}": size / 1e9 for name, size in limits.items() if size}


def of_evaluation(row: Mapping[str, Any]) -> dict[str, float]:
    """Named values of one evaluation: its loss, and that of each held-out text where there are several."""
    found = {"eval/loss": float(row["eval_loss"])} if _number(row.get("eval_loss")) else {}
    several = row.get("eval_losses")
    if isinstance(several, Mapping) and len(several) > 1:
        found |= {f"eval/{name}": float(value) for name, value in several.items() if _number(value)}
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
