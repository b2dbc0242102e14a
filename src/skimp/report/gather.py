"""What a report is made of: the files of a run's folder, read once; a run that died has fewer of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skimp.core.errors import CheckpointError


@dataclass(frozen=True)
class Story:
    """A run as its folder tells it.

    Attributes:
        folder: the run's.
        recipe, plan: as stored when it began; empty when there are none.
        summary: empty when the run did not come to its end.
        metrics: one mapping a step, in order; evals: one per evaluation.
        timeline: memory over one step (`skimp.core.memory.timeline`), None when no step was watched.
    """

    folder: Path
    recipe: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    evals: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def on_cpu(self) -> bool:
        """Whether the budget is for the whole process."""
        return self.place("device", "name") in (None, "cpu")

    def place(self, where: str, what: str) -> Any:
        """`plan["places"][where][what]`, None when there is no plan."""
        return self.plan.get("places", {}).get(where, {}).get(what)

    @property
    def budget(self) -> int | None:
        """Bytes the computing device may hold."""
        found: int | None = self.place("device", "budget_bytes")
        return found

    @property
    def baseline(self) -> int:
        """Bytes of the process before any tensor; 0 where the budget is a card's, which does not hold it."""
        if not self.on_cpu:
            return 0
        return int(self.summary.get("rss_baseline_bytes") or self.place("host", "baseline_bytes") or 0)

    @property
    def same_plan(self) -> bool:
        """Whether the watched step ran under the plan that is stored: a run that survived a shortage has another."""
        return self.timeline is None or self.timeline.get("chosen") in (None, self.plan.get("chosen"))

    @property
    def planned_tensors(self) -> int | None:
        """Planned bytes of tensors at the fullest moment of training."""
        found: int | None = self.plan.get("phases", {}).get("train")
        return found

    @property
    def measured_tensors(self) -> int | None:
        """Bytes of tensors at the fullest moment of the watched step."""
        measured = self.summary.get("measured_peak_bytes")
        return measured or (self.timeline["peak"]["total"] if self.timeline else None)

    @property
    def resident_peak(self) -> int | None:
        """Most bytes the system counted for the process, over all the run's processes."""
        found = [m.get("memory_peak_bytes") or m["memory_bytes"] for m in self.metrics]
        found.append(self.summary.get("rss_peak_bytes") or 0)
        return max(found) or None

    @property
    def held_out(self) -> tuple[float, float] | None:
        """First and last held-out loss, None with fewer than two."""
        found = [row["eval_loss"] for row in self.evals if isinstance(row.get("eval_loss"), float)]
        return (found[0], found[-1]) if len(found) > 1 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Trained tokens by seconds of steps, over all steps."""
        seconds = sum(m["seconds"] for m in self.metrics)
        return sum(m["tokens"] for m in self.metrics) / seconds if seconds else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean seconds of a step, over all steps."""
        return sum(m["seconds"] for m in self.metrics) / len(self.metrics) if self.metrics else None


def gather(folder: Path) -> Story:
    """Read a run's folder.

    Raises:
        CheckpointError: no run there, or one that ended before its first step; or a file of it is damaged.
    """
    if not (folder / "recipe.json").is_file():
        raise CheckpointError(
            f"a report of the run in {folder}",
            "no recipe.json",
            "a run's folder holds the recipe it was started with",
            "skimp report RUN, with the folder named by the recipe's `output`",
        )
    metrics = _lines(folder / "metrics.jsonl")
    if not metrics:
        raise CheckpointError(
            f"a report of the run in {folder}",
            "no finished step",
            "there is nothing to draw before the first line of metrics.jsonl",
            f"skimp doctor {folder}: what became of it",
        )
    return Story(
        folder,
        _object(folder / "recipe.json"),
        _object(folder / "plan.json"),
        _object(folder / "summary.json"),
        metrics,
        _lines(folder / "evals.jsonl"),
        _object(folder / "timeline.json") or None,
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise _damaged(path, error) from error
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; a last one without its newline is what a death left, and is skipped."""
    if not path.is_file():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        return [dict(json.loads(line)) for line in whole]
    except (ValueError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"reading {path}", str(error), "it is damaged", "move it away: the report goes without it")


def totals(timeline: Mapping[str, Any]) -> list[int]:
    """All bytes of each point of a timeline."""
    return [sum(parts) for parts in zip(*timeline["bytes"].values(), strict=True)]


def segments(timeline: Mapping[str, Any], shortest: float = 0.004) -> list[tuple[str, int, int]]:
    """Runs of one phase as (phase, first point, last point), in order.

    Runs shorter than `shortest` of the whole time belong to the one before: in a step in backward, the phase is
    "optimizer" for an instant at every parameter. The norm for clipping and the update that follows are one "step".
    """
    seconds, phases = timeline["seconds"], timeline["phases"]
    runs: list[tuple[str, int, int]] = []
    for point, index in enumerate(timeline["phase"]):
        name = {"": "ready", "clip": "step", "optimizer": "step"}.get(phases[index], phases[index])
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1], point)
        else:
            runs.append((name, point, point))
    whole = (seconds[-1] - seconds[0]) or 1.0
    kept: list[tuple[str, int, int]] = []
    for number, (name, first, last) in enumerate(runs):
        end = seconds[runs[number + 1][1]] if number + 1 < len(runs) else seconds[-1]
        if kept and (kept[-1][0] == name or (end - seconds[first]) / whole < shortest):
            kept[-1] = (kept[-1][0], kept[-1][1], last)
        else:
            kept.append((name, first, last))
    return kept


def rounds(runs: Iterable[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """(first, last) point of each forward with its backward: the micro-batches, or the passes of a clipped step in
    backward."""
    found: list[tuple[int, int]] = []
    for name, first, last in runs:
        if name == "forward":
            found.append((first, last))
        elif found and name == "backward":
            found[-1] = (found[-1][0], last)
    return found
