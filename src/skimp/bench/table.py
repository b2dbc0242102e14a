"""The pre-training table: one row a method, best first, with what it was measured on."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from skimp.bench.profiles import LADDER, Profile, best
from skimp.bench.runs import Results
from skimp.core.units import format_bytes

YARDSTICK = "adamw"


def markdown(
    profile: Profile, methods: Sequence[str], seeds: Sequence[int], results: Results, text: str, jobs: int
) -> str:
    """The table, and under it everything a reader needs to judge it."""
    rows = sorted((_row(m, seeds, results) for m in methods), key=lambda row: row["order"])
    plain = next((row["perplexity"] for row in rows if row["method"] == YARDSTICK), None)
    lines = [
        "| method | held-out perplexity | against adamw | learning rate | state bytes | peak of tensors | step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(_cells(row, plain)) + " |")
    lines += ["", *_facts(profile, seeds, results, text, jobs)]
    return "\n".join(lines) + "\n"


def _row(method: str, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    losses = results.losses(method)
    row: dict[str, Any] = {"method": method, "perplexity": None, "order": (1, method)}
    why = results.refused(method)
    if why:
        return {**row, "why": why, "order": (3, method)}
    if not any(math.isfinite(loss) for (_, seed), loss in losses.items() if seed == seeds[0]):
        return {**row, "why": "diverged at every rate" if losses else "not run yet", "order": (2, method)}
    rate = best(seeds[0], losses)
    tried = sorted(lr for lr, seed in losses if seed == seeds[0])
    same = (r for r in results.lines if r["method"] == method and r["lr"] == rate and r["seed"] in seeds)
    own = [r for r in same if r["loss"] is not None]
    perplexities = [math.exp(r["loss"]) for r in own]
    return {
        **row,
        "perplexity": mean(perplexities),
        "spread": stdev(perplexities) if len(perplexities) > 1 else None,
        "runs": len(perplexities),
        "wanted": len(seeds),
        "lr": rate,
        "edge": rate in (tried[0], tried[-1]) and len(tried) > 1,
        "state": own[0]["state_bytes"],
        "peak": max(r["peak_bytes"] or 0 for r in own),
        "seconds": mean(r["seconds_per_step"] for r in own),
        "order": (0, mean(perplexities)),
    }


def _cells(row: dict[str, Any], plain: float | None) -> list[str]:
    if row["perplexity"] is None:
        return [row["method"], row["why"].replace("|", "/").splitlines()[0], "", "", "", "", ""]
    spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
    some = "" if row["runs"] == row["wanted"] else f" ({row['runs']} of {row['wanted']} seeds)"
    against = "" if plain is None else f"{100 * (row['perplexity'] / plain - 1):+.1f} %"
    return [
        row["method"],
        f"{row['perplexity']:.2f}{spread}{some}",
        against,
        f"{row['lr']:g}" + (" (edge)" if row["edge"] else ""),
        format_bytes(row["state"]),
        format_bytes(row["peak"]),
        f"{1000 * row['seconds']:.0f} ms",
    ]


def _facts(profile: Profile, seeds: Sequence[int], results: Results, text: str, jobs: int) -> list[str]:
    versions = results.lines[-1].get("versions", {}) if results.lines else {}
    packages = ", ".join(f"{k} {versions[k]}" for k in ("python", "torch", "transformers", "skimp") if k in versions)
    dates = sorted({r["date"] for r in results.lines}) or [time.strftime("%Y-%m-%d")]
    return [
        f"Profile `{profile.name}`: a Llama of {profile.parameters:,} parameters from random weights, "
        f"{profile.tokens:,} tokens a run in {profile.steps} steps of {profile.batch_tokens:,}, sequence {profile.seq}"
        f"; text: Python's language reference and the docstrings {'and source ' if profile.code else ''}of its library "
        f"(SHA-256 {text[:12]}…), a twentieth held out, {profile.eval_tokens:,} tokens of it scored.",
        "",
        f"Learning rate: the best of the ladder {', '.join(f'{r:g}' for r in LADDER)} for seed {seeds[0]}, walked from "
        f"{profile.rungs} neighbours until the best is not at an end of what was tried; (edge) where it still is. "
        f"Perplexity: mean and standard deviation over seeds {', '.join(map(str, seeds))}; the first one also chose "
        "the rate. Cosine to a tenth, warm-up a tenth, clip 1 (CompAct: none), no weight decay, "
        "float32 unless the method says "
        "otherwise. Ranks are a quarter of the width, bases last a tenth of the run, at most.",
        "",
        f"State bytes are the optimizer's at any one time; the peak is of all tensors in a step, as tracked. Step: "
        f"median wall time, {jobs} runs at a time with one thread each.",
        "",
        f"{machine()}; {packages}; {dates[0]}{' to ' + dates[-1] if len(dates) > 1 else ''}.",
    ]


def machine() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next(line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
