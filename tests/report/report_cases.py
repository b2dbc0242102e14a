"""Folders of runs as a session leaves them, made of numbers: one finished, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GB = 10**9
#: Phase, owner, seconds, and bytes in 10 MB by category, of a step of two micro-batches.
POINTS = [
    ("", "", 0.0, (50, 0, 0)),
    ("forward", "block 0", 0.5, (50, 0, 10)),
    ("forward", "loss head", 1.0, (50, 0, 20)),
    ("backward", "block 0", 2.0, (50, 20, 20)),
    ("forward", "block 0", 3.0, (50, 20, 10)),
    ("forward", "loss head", 3.5, (50, 20, 25)),
    ("backward", "block 0", 4.0, (50, 20, 40)),
    ("clip", "", 5.0, (50, 20, 0)),
    ("optimizer", "a", 5.1, (50, 20, 1)),
    ("clip", "", 5.2, (50, 10, 0)),
    ("optimizer", "b", 5.3, (50, 10, 1)),
]


def timeline() -> dict[str, Any]:
    phases = ["", "forward", "backward", "clip", "optimizer"]
    owners = ["", "block 0", "loss head", "a", "b"]
    names = ("weights", "gradients", "activations")
    return {
        "step": 2,
        "operators": 110,
        "peak": {"total": 110 * 10**7, "by_category": {"weights": 50 * 10**7, "gradients": 20 * 10**7,
                 "activations": 40 * 10**7}, "phase": "backward", "owner": "block 0", "operator": "aten::mm"},
        "stride": 1,
        "operator": [10 * i for i in range(len(POINTS))],
        "seconds": [p[2] for p in POINTS],
        "resident": [(sum(p[3]) + 43) * 10**7 for p in POINTS],
        "phases": phases,
        "phase": [phases.index(p[0]) for p in POINTS],
        "owners": owners,
        "owner": [owners.index(p[1]) for p in POINTS],
        "bytes": {name: [p[3][i] * 10**7 for p in POINTS] for i, name in enumerate(names)},
    }  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    return {
        "fits": True,
        "model": "tiny <model>",
        "parameters": 125_000_000,
        "peak_bytes": 16 * GB // 10,
        "by_category": {"weights": GB // 2, "gradients": GB // 5, "activations": 4 * GB // 10,
                        "baseline": 4 * GB // 10, "allocator": GB // 10},
        "where": "backward, block 0, aten::mm",
        "phases": {"train": 11 * GB // 10, "load": GB},
        "chosen": {"micro_rows": 1, "recompute": [0], "in_backward": False},
        "why": ["recompute 1 of 1 blocks: saves 1.00 GB, costs 12% time"],
        "notes": ["no gradient clipping"],
        "alternatives": [{"fits": False, "peak_bytes": 3 * GB, "label": "no recompute", "exact": True,
                          "overrides": ["exact.recompute=0"]}],
        "predicted_step_seconds": 4.0,
        "moments": {"forward": {"block 0": GB, "loss head": GB}, "backward": {"block 0": 11 * GB // 10},
                    "optimizer": {"": 8 * GB // 10}},
        "places": {"device": {"name": "cpu", "budget_bytes": 2 * GB, "peak_bytes": 16 * GB // 10},
                   "host": {"budget_bytes": 2 * GB, "baseline_bytes": 4 * GB // 10},
                   "disk": {"budget_bytes": 9 * GB, "peak_bytes": GB}},
        **changes,
    }  # fmt: skip


SUMMARY = {
    "measured_peak_bytes": 11 * GB // 10, "rss_peak_bytes": 15 * GB // 10, "rss_baseline_bytes": 4 * GB // 10,
    "stopped": "finished", "steps": 6, "survived": ["step 3: memory ran short & was found"],
    "samples": {"before": "<b>once", "after": "twice"},
    "versions": {"torch": "2.13", "threads": 2},
    "data": {"trains": [{"name": "train", "sources": ["a.jsonl"], "rows_read": 1234, "dropped": {"empty": 3},
                         "packing": {"documents_in": 1200, "tokens_in": 50_000, "rows": 98, "trained_tokens": 48_800,
                                     "padding_tokens": 0, "truncated_documents": 2}}], "validations": [],
             "notes": ["a note of the data"]},
    "adapter_table": [{"module": f"layers.{i}.q", "target": "q_proj", "shape": [4, 4], "rank": 2, "parameters": 16,
                       "bytes": 64} for i in range(3)],
    "optimizer_table": [
        {"parameter": f"layers.{i}.w", "shape": [4, 4], "rule": "adamw", "lr": 1e-3, "weight_decay": 0.1,
         "state_bytes": 128} for i in range(12)
    ],
}  # fmt: skip


def metrics(steps: int) -> list[dict[str, Any]]:
    return [
        {"step": n, "loss": 3.0 - 0.1 * n, "grad_norm": 1.5, "lr": 1e-4 * n, "tokens": 128, "seconds": 5.0,
         "tokens_per_second": 25.6, "memory_bytes": GB, "memory_peak_bytes": 14 * GB // 10 + n}
        for n in range(1, steps + 1)
    ]  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run of six steps."""
    folder = tmp_path / "my run"
    folder.mkdir()
    recipe = {"model": {"name": "tiny"}, "precision": "fp32", "optimizer": {"name": "adamw"},
              "train": {"steps": 6, "clip": 1.0}, "sample": {"prompt": "say & go "}}  # fmt: skip
    for name, value in (("recipe", recipe), ("plan", plan()), ("summary", SUMMARY), ("timeline", timeline())):
        (folder / f"{name}.json").write_text(json.dumps(value))
    write_lines(folder / "metrics.jsonl", metrics(6))
    write_lines(
        folder / "evals.jsonl",
        [{"step": 0, "eval_loss": 3.5}, {"step": 3, "eval_loss": 3.25}, {"step": 6, "eval_loss": 3.125}],
    )
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
