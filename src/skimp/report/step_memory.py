"""Memory over one optimizer step as it will be drawn: layers, lines and phases, each in bytes over seconds.

The page (SVG) and the PNG draw the same `StepMemory`, so that they cannot tell two stories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skimp.core.units import format_bytes
from skimp.report.gather import Story, rounds, segments, totals
from skimp.report.svg import thin

#: From the ground up: what always stays, then what comes and goes. Unknown categories go on top.
ORDER = ("process", "weights", "adapters", "optimizer", "batch", "gradients", "activations", "logits", "workspace")
#: What is written in a strip that is too narrow for the word.
SHORT = {"forward": "fwd", "backward": "bwd", "backward and step": "bwd"}
#: A budget further above everything than this is named and not drawn: it would press the picture flat.
FAR = 1.8


@dataclass(frozen=True)
class Level:
    """A horizontal line: what it is, where, and its look: 'budget', 'planned' or 'resident'."""

    words: str
    size: int
    kind: str


@dataclass(frozen=True)
class StepMemory:
    """Ready to draw.

    Attributes:
        seconds: of each point since the step began; end: of the step.
        layers: (category, bytes at each point), from the ground up.
        resident: what the system counted at each point, None where it was not read.
        planned: the most the plan foretold for the phase and block of each point, None without.
        levels: budget and planned peaks.
        phases: (name, first second, last second); rounds: the same of each micro-batch or pass.
        peak: index of the fullest point; where: its address for a person.
        beyond: a sentence on what lies above the picture, empty when nothing does.
        step: which optimizer step this was; owners: the address of each point.
    """

    seconds: list[float]
    end: float
    layers: list[tuple[str, list[int]]]
    resident: list[int] | None
    planned: list[int] | None
    levels: list[Level]
    phases: list[tuple[str, float, float]]
    rounds: list[tuple[str, float, float]]
    peak: int
    where: str
    beyond: str
    step: int
    owners: list[str] = field(repr=False, default_factory=list)

    @property
    def top(self) -> list[int]:
        """All bytes at each point."""
        return [sum(parts) for parts in zip(*(sizes for _, sizes in self.layers), strict=True)]

    @property
    def highest(self) -> int:
        """The highest thing drawn."""
        return max([*self.top, *(self.resident or []), *(level.size for level in self.levels)])

    def title(self) -> str:
        """One sentence for those who do not see the picture."""
        return f"Memory over optimizer step {self.step}: at most {format_bytes(self.top[self.peak])}, {self.where}"


def step_memory(story: Story, columns: int = 760) -> StepMemory | None:
    """What to draw of a run's watched step; None when no step was watched.

    Args:
        story: the run.
        columns: points kept: one a pixel column, each the fullest moment within it.
    """
    drawn = story.timeline
    if drawn is None or not drawn["operator"]:
        return None
    seconds, sums = drawn["seconds"], totals(drawn)
    kept = thin(seconds, columns, lambda i, j: i if sums[i] >= sums[j] else j)
    baseline = story.baseline
    categories = sorted((c for c, sizes in drawn["bytes"].items() if max(sizes) > 0), key=_rank)
    layers = [("process", [baseline] * len(kept))] if baseline else []
    layers += [(c, [drawn["bytes"][c][i] for i in kept]) for c in categories]
    runs = segments(drawn)
    peak = max(range(len(kept)), key=lambda i: sums[kept[i]])
    owners = [drawn["owners"][drawn["owner"][i]] for i in kept]
    resident = [drawn["resident"][i] for i in kept] if drawn["resident"] and story.on_cpu else None
    highest = max([*(s + baseline for s in sums), *(resident or [])])
    levels, beyond = _levels(story, highest)
    at = drawn["peak"]
    where = ", ".join(part for part in (at["phase"], at["owner"]) if part) or "before the first operator"
    where += f" ({at['operator']})" if at.get("operator") else ""
    return StepMemory(
        [seconds[i] for i in kept],
        seconds[-1],
        layers,
        resident,
        _planned(story, drawn, kept),
        levels,
        [(_phase(name, story), seconds[first], _until(runs, n, seconds)) for n, (name, first, _) in enumerate(runs)],
        [(f"{_round(story)} {n + 1}", seconds[a], seconds[b]) for n, (a, b) in enumerate(rounds(runs))],
        peak,
        where,
        beyond,
        drawn["step"],
        owners,
    )


def _rank(category: str) -> tuple[int, str]:
    return (ORDER.index(category) if category in ORDER else len(ORDER), category)


def _until(runs: Sequence[tuple[str, int, int]], n: int, seconds: Sequence[float]) -> float:
    return seconds[runs[n + 1][1]] if n + 1 < len(runs) else seconds[-1]


def _phase(name: str, story: Story) -> str:
    return "backward and step" if name == "backward" and _in_backward(story) else name


def _in_backward(story: Story) -> bool:
    return bool(story.plan.get("chosen", {}).get("in_backward"))


def _round(story: Story) -> str:
    return "pass" if _in_backward(story) else "micro-batch"


def _levels(story: Story, highest: int) -> tuple[list[Level], str]:
    """Budget and planned peaks, and a sentence on a budget that is too far above to be drawn."""
    levels = []
    tensors = story.planned_tensors
    if tensors is not None and story.same_plan:
        name = "planned: tensors" if story.baseline else "planned peak"
        levels.append(Level(name, tensors + story.baseline, "planned"))
    if story.on_cpu and story.plan.get("peak_bytes") and story.same_plan:
        levels.append(Level("planned: whole process", story.plan["peak_bytes"], "planned"))
    budget = story.budget
    if budget is None:
        return levels, ""
    what = "budget" if story.on_cpu else f"budget of {story.place('device', 'name')}"
    if budget <= FAR * max([highest, *(level.size for level in levels)]):
        return [*levels, Level(what, budget, "budget")], ""
    return levels, f"{what}: {format_bytes(budget)}, far above this picture"


def _planned(story: Story, drawn: dict[str, Any], kept: Sequence[int]) -> list[int] | None:
    """What the plan foretold for the phase and place of each point; None where the plan has no such places."""
    moments = story.plan.get("moments")
    if not moments or not story.same_plan:
        return None
    found: list[int] = []
    for i in kept:
        inside = moments.get(drawn["phases"][drawn["phase"][i]], {})
        size = inside.get(drawn["owners"][drawn["owner"][i]], inside.get(""))
        found.append(size + story.baseline if size is not None else found[-1] if found else 0)
    return found
