"""The fine-tuning table: one row a method, best first, and the rows it is judged by: guesses, the base, full tuning."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from skimp.bench import tasks
from skimp.bench.profiles import best
from skimp.bench.runs import Results
from skimp.bench.table import machine
from skimp.bench.tuning import BASE, LADDER, Grown, Tuning
from skimp.core.units import format_bytes

HEADER = (
    "method", *tasks.MARKS, "mean", "learning rate", "trained", "peak, planned", "measured", "tokens/s", "handed over",
)  # fmt: skip


def rows_of(
    profile: Tuning, methods: Sequence[str], seeds: Sequence[int], results: Results, items: Path
) -> list[dict[str, Any]]:
    """The table as data: shares of right answers with their standard errors, and what each method took.

    A row has `method`, and either `why` (nothing could be measured), or `accuracy` (task, and "mean", to share) with
    `error` (the same keys), and of what trained `lr`, `edge`, `runs`, `wanted`, `trained`, `planned`, `peak` (bytes),
    `speed` (tokens a second) and `handed` (bytes).
    """
    floor = tasks.floors(items)
    floor["mean"] = mean(floor.values())
    above: list[dict[str, Any]] = [{"method": "most frequent answer", "accuracy": floor, "error": {}}]
    base = [r for r in results.lines if r["method"] == BASE]
    if base and base[-1]["status"] == "done":
        above.append({"method": "the base, untuned", **accuracies(base[-1:])})
    elif base:
        above.append({"method": "the base, untuned", "why": base[-1].get("why") or base[-1]["status"]})
    found = [_row(method, seeds, results) for method in methods]
    found.sort(key=lambda row: (0, -row["accuracy"]["mean"]) if "accuracy" in row else (1, 0.0))
    return above + found


def accuracies(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of right answers over runs, by task and as the mean of tasks, with standard errors.

    Several runs: the standard deviation over runs / sqrt(runs). One: that of a share of n items, sqrt(p (1 - p) / n).
    """
    shares: dict[str, list[float]] = {task: [] for task in (*tasks.MARKS, "mean")}
    variances: list[float] = []
    single: dict[str, float] = {}
    for record in records:
        for task, (right, of) in record["right"].items():
            shares[task].append(right / of)
            single[task] = math.sqrt(right / of * (1 - right / of) / of)
        variances = [error**2 for task, error in single.items() if task != "mean"]
        shares["mean"].append(mean(shares[task][-1] for task in tasks.MARKS))
    single["mean"] = math.sqrt(sum(variances)) / len(variances)
    error = {t: stdev(s) / math.sqrt(len(s)) if len(s) > 1 else single[t] for t, s in shares.items()}
    return {"accuracy": {t: mean(s) for t, s in shares.items()}, "error": error}


def _row(method: str, seeds: Sequence[int], results: Results) -> dict[str, Any]:
    losses = results.losses(method)
    why = results.refused(method)
    if why:
        return {"method": method, "why": why}
    if not any(math.isfinite(loss) for (_, seed), loss in losses.items() if seed == seeds[0]):
        return {"method": method, "why": "diverged at every rate" if losses else "not run yet"}
    rate = best(seeds[0], losses)
    tried = sorted(lr for lr, seed in losses if seed == seeds[0])
    same = (r for r in results.lines if r["method"] == method and r["lr"] == rate and r["seed"] in seeds)
    own = [r for r in same if r["loss"] is not None]
    return {
        "method": method,
        **accuracies(own),
        "lr": rate,
        "edge": rate in (tried[0], tried[-1]) and len(tried) > 1,
        "runs": len(own),
        "wanted": len(seeds),
        "trained": own[0]["trained"],
        "planned": own[0]["planned_peak_bytes"],
        "peak": max(r["peak_bytes"] or 0 for r in own),
        "speed": mean(r["batch_tokens"] / r["seconds_per_step"] for r in own),
        "handed": own[0]["handed_bytes"],
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as words, in the order of `HEADER`."""
    if "why" in row:
        return [row["method"], row["why"].replace("|", "/").splitlines()[0], *[""] * (len(HEADER) - 2)]
    shares = []
    for task in (*tasks.MARKS, "mean"):
        error = row["error"].get(task)
        shares.append(f"{100 * row['accuracy'][task]:.1f}" + ("" if error is None else f" ± {100 * error:.1f}"))
    if "lr" not in row:
        return [row["method"], *shares, *[""] * (len(HEADER) - 1 - len(shares))]
    some = "" if row["runs"] == row["wanted"] else f" ({row['runs']} of {row['wanted']} seeds)"
    return [
        row["method"] + some,
        *shares,
        f"{row['lr']:g}" + (" (edge)" if row["edge"] else ""),
        f"{row['trained']:,}",
        format_bytes(row["planned"]),
        format_bytes(row["peak"]),
        f"{row['speed']:,.0f}",
        format_bytes(row["handed"]),
    ]


def markdown(
    profile: Tuning, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int], results: Results, items: Path, jobs: int
) -> str:
    """The table, and under it everything a reader needs to judge it."""
    lines = ["| " + " | ".join(HEADER) + " |", "|---|" + "---:|" * (len(HEADER) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join([*lines, "", *facts(profile, seeds, results, items, jobs)]) + "\n"


def facts(profile: Tuning, seeds: Sequence[int], results: Results, items: Path, jobs: int) -> list[str]:
    """What the numbers were measured on, and how."""
    versions = results.lines[-1].get("versions", {}) if results.lines else {}
    packages = ", ".join(f"{k} {versions[k]}" for k in ("python", "torch", "transformers", "skimp") if k in versions)
    dates = sorted({r["date"] for r in results.lines}) or [time.strftime("%Y-%m-%d")]
    model = profile.model if isinstance(profile.model, str) else _grown(profile.model, results)
    parts = tasks.facts_of(items)
    sizes = "; ".join(f"{part} " + ", ".join(f"{n} {t}" for t, n in of.items()) for part, of in parts.items())
    digest = (items / "items.sha256").read_text(encoding="utf-8").strip()
    return [
        f"Profile `{profile.name}`: {model}; each method {profile.steps} steps of {profile.batch_tokens:,} tokens, "
        f"sequence {profile.seq}. Items: {sizes} (SHA-256 {digest[:12]}…); no number pair, module or sentence is in "
        f"two parts. Largest number of a word problem: {profile.sizes.largest}.",
        "",
        "Percent of right answers to the test part, greedy, at most "
        f"{profile.answer} tokens: mean and standard error over seeds {', '.join(map(str, seeds))}"
        f"{'' if len(seeds) > 1 else ' (one seed: of a share of so many items)'}. Seeds change the additions and the "
        "order of data, not the base. "
        f"Learning rate: by the loss on the dev part for seed {seeds[0]}, on the ladder "
        f"{', '.join(f'{r:g}' for r in LADDER)}, {profile.rungs} neighbours first"
        f"{', walked on while the best is at an end' if profile.rungs > 2 else ''}; (edge) where it is at an end. "
        "Cosine to a tenth, warm-up a tenth, clip 1, no weight decay, AdamW (gradnormlorp: GaLore), float32.",
        "",
        "Peaks are of all tensors in a step: simulated before, tracked while it ran. Tokens a second: of median steps, "
        f"prompts included, {jobs} runs at a time with one thread each. Handed over: weights in the last checkpoint.",
        "",
        f"{machine()}; {packages}; {dates[0]}{' to ' + dates[-1] if len(dates) > 1 else ''}.",
    ]


def _grown(grown: Grown, results: Results) -> str:
    base = next((r for r in results.lines if r["method"] == BASE and r["loss"] is not None), None)
    reached = f", held-out perplexity {math.exp(base['loss']):.1f}" if base else ""
    return (
        f"a Llama of {grown.blocks} blocks, width {grown.hidden}, vocabulary {grown.vocab:,}, pre-trained for it on "
        f"{grown.tokens:,} tokens of Python's documentation, source and bare sums{reached}"
    )
