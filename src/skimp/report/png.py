"""`memory.png`: the same picture as the page's, by matplotlib, for a README, a mail or a slide."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from skimp.core.units import format_bytes
from skimp.report.frontier_picture import is_near, on_cpu
from skimp.report.step_memory import SHORT, StepMemory
from skimp.report.svg import apart

#: Neighbours differ in lightness, so that they can be told apart in grey: process light, weights dark, optimizer
#: middle, gradients light, activations dark, logits very light, workspace dark.
COLOURS = {
    "process": "#c9ced3",
    "weights": "#23395b",
    "adapters": "#7a5195",
    "optimizer": "#5b93bf",
    "batch": "#9aa0a6",
    "gradients": "#f0b429",
    "activations": "#2f8f6f",
    "logits": "#f3e39b",
    "workspace": "#b5473c",
}
STRIPS = {"forward": "#dcebf5", "backward": "#bcd3e6", "step": "#f6dfae"}
LINES = {"budget": ("#c62828", "-", 1.8), "planned": ("#111418", (0, (6, 3)), 1.3)}
DARK = ("weights", "activations", "workspace", "adapters")


def memory_png(memory: StepMemory, title: str) -> bytes:
    """The picture as the bytes of a PNG, 1500 × 660 pixels.

    Args:
        memory: what to draw.
        title: the run's name.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    gb, unit = (1e9, "GB") if memory.highest >= 1e9 else (1e6, "MB")
    figure = Figure(figsize=(10, 4.4), dpi=150)
    axes = figure.add_axes((0.06, 0.12, 0.71, 0.68))
    xs = [*memory.seconds, memory.end]
    lower = [0.0] * len(xs)
    for category, sizes in memory.layers:
        upper = [low + s / gb for low, s in zip(lower, [*sizes, sizes[-1]], strict=True)]
        colour = COLOURS.get(category, "#888888")
        axes.fill_between(xs, lower, upper, step="post", color=colour, linewidth=0.4, edgecolor="white")
        _name(axes, category, xs, lower, upper, 1.13 * memory.highest / gb, memory.end)
        lower = upper
    if memory.planned is not None:
        axes.step(memory.seconds, [b / gb for b in memory.planned], ":", where="post", color="#111418", lw=1.2)
    if memory.resident is not None:
        axes.plot(memory.seconds, [r / gb for r in memory.resident], color="#111418", linewidth=1.0)
    axes.set_xlabel(f"seconds into optimizer step {memory.step}")
    axes.set_ylabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    _levels(axes, memory, gb)
    axes.set_xlim(0, memory.end)
    axes.set_ylim(0, 1.13 * memory.highest / gb)
    _peak(axes, memory, gb)
    _strips(figure, memory)
    figure.text(0.06, 0.945, f"{title}: memory over one optimizer step", fontsize=11, fontweight="bold")
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "skimp"})
    return out.getvalue()


def _name(
    axes: Any, category: str, xs: list[float], lower: list[float], upper: list[float], top: float, end: float
) -> None:
    """The name inside its layer, where the layer is thick for the width of the word."""
    wide = 0.013 * end * len(category)
    best, place = -top, None
    for i in range(0, len(xs), max(1, len(xs) // 200)):
        j, floor, ceiling = i, lower[i], upper[i]
        while j + 1 < len(xs) and xs[j] - xs[i] < wide:
            j += 1
            floor, ceiling = max(floor, lower[j]), min(ceiling, upper[j])
        score = ceiling - floor - 0.05 * top * abs((xs[i] + wide / 2) / end - 0.5)  # ties: nearest to the middle
        if xs[j] - xs[i] >= wide and ceiling - floor >= 0.045 * top and score > best:
            best, place = score, ((xs[i] + wide / 2), (floor + ceiling) / 2)
    if place is not None:
        colour = "white" if category in DARK else "#1b1f23"
        axes.text(*place, category, ha="center", va="center", fontsize=8.5, fontweight="bold", color=colour)


def _levels(axes: Any, memory: StepMemory, gb: float) -> None:
    """Budget and planned peaks, named in the margin."""
    items = [(level.words, level.size, level.kind) for level in memory.levels]
    if memory.resident is not None:
        items.append(("measured: whole process", max(memory.resident), "resident"))
    top = 1.13 * memory.highest / gb
    # Margin places are counted from the top down, as `apart` does.
    places = apart([top - size / gb for _, size, _ in items], 0.085 * top, 0.0, top)
    for (words, size, kind), place in zip(items, places, strict=True):
        colour, style, width = LINES.get(kind, ("#111418", "-", 1.0))
        if kind in LINES:
            axes.axhline(size / gb, color=colour, linestyle=style, linewidth=width)
        axes.annotate(
            f"{format_bytes(size)}  {words}",
            xy=(memory.end, size / gb),
            xytext=(memory.end * 1.02, top - place),
            annotation_clip=False,
            va="center",
            fontsize=8.5,
            color=colour,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5), "shrinkB": 0},
        )
    if memory.planned is not None:
        axes.plot([1.02 * memory.end, 1.06 * memory.end], [0.02 * top] * 2, ":", color="#111418", lw=1.2, clip_on=False)
        axes.text(1.07 * memory.end, 0.02 * top, "planned, block by block", va="center", fontsize=8.5)
    if memory.beyond:
        axes.text(memory.end, top * 0.97, "↑ " + memory.beyond, ha="right", va="top", fontsize=8.5)


def _peak(axes: Any, memory: StepMemory, gb: float) -> None:
    """A ring at the fullest moment, its address above."""
    x, y = memory.seconds[memory.peak], memory.top[memory.peak] / gb
    top = 1.13 * memory.highest / gb
    axes.plot([x], [y], "o", markersize=6, markerfacecolor="none", color="#111418", markeredgewidth=1.5)
    axes.plot([x, x], [y * 1.01, top * 0.975], color="#111418", linewidth=0.8)
    share = x / memory.end
    side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
    words = f"fullest: {format_bytes(memory.top[memory.peak])}, {memory.where}"
    axes.text(x, top * 0.985, words, ha=side, va="bottom", fontsize=8.5, fontweight="bold")


def _strips(figure: Any, memory: StepMemory) -> None:
    """Micro-batches and phases, above the picture."""
    strip = figure.add_axes((0.06, 0.855, 0.71, 0.065))
    strip.set_xlim(0, memory.end)
    strip.set_ylim(0, 2)
    strip.axis("off")
    if len(memory.rounds) > 1:
        for name, begin, end in memory.rounds:
            strip.barh(1.5, end - begin, left=begin, height=0.9, color="#f0f2f4", edgecolor="#b8bec4", linewidth=0.5)
            _fitting(strip, begin, end, 1.5, memory.end, (name, name.rpartition(" ")[2]))
    for name, begin, end in memory.phases:
        colour = STRIPS.get(name.partition(" ")[0], "#e6e9ec")
        strip.barh(0.5, end - begin, left=begin, height=0.9, color=colour, edgecolor="#b8bec4", linewidth=0.4)
        _fitting(strip, begin, end, 0.5, memory.end, (name, SHORT.get(name, name)))


def _fitting(strip: Any, begin: float, end: float, y: float, whole: float, choices: tuple[str, ...]) -> None:
    for words in choices:
        if 0.0092 * len(words) * whole <= end - begin:
            strip.text((begin + end) / 2, y, words, ha="center", va="center_baseline", fontsize=7.5)
            return


def frontier_png(plan: Mapping[str, Any]) -> bytes:
    """The frontier of `Plan.as_dict()` as the bytes of a PNG, 960 x 600 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120)
    axes = figure.add_axes((0.1, 0.12, 0.86, 0.78))
    sizes = [p["peak_bytes"] / 1e9 for p in plan["frontier"]]
    axes.step(sizes, [p["seconds"] for p in plan["frontier"]], "-o", where="post", color="#2f8f6f", markersize=4)
    axes.plot([plan["peak_bytes"] / 1e9], [plan["predicted_step_seconds"]], "o", color="#c62828", label="chosen")
    budget = plan["places"]["device"]["budget_bytes"] / 1e9
    sizes.append(plan["peak_bytes"] / 1e9)
    if is_near(budget, sizes):
        axes.axvline(budget, color="#c62828", linewidth=1.5, label="budget")
        sizes.append(budget)
    low, high = min(sizes), max(sizes)
    axes.set_xlim(low - 0.05 * (high - low or high), high + 0.05 * (high - low or high))
    axes.set_xlabel("GB of the whole process" if on_cpu(plan) else "GB on the card")
    axes.set_ylabel("seconds of a step")
    axes.set_title(f"{plan['model']}: memory against time", fontsize=11, fontweight="bold")
    axes.grid(color="#e3e6e9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "skimp"})
    return out.getvalue()
