"""What went on over the steps: loss, throughput, resident memory, gradient norm, learning rate; a small chart each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skimp.core.units import format_bytes
from skimp.report.gather import Story
from skimp.report.svg import Scale, apart, line, number, picture, polyline, text, thin, ticks

WIDTH, HEIGHT = 480, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 396, 30, 200


@dataclass(frozen=True)
class Curve:
    """A line over steps; `kind` is its CSS class; `dots` marks each point."""

    name: str
    steps: list[float]
    values: list[float]
    kind: str
    dots: bool = False


def curves(story: Story) -> list[str]:
    """All charts that have something to show, as SVG."""
    steps = [float(m["step"]) for m in story.metrics]

    def of(key: str) -> list[float]:
        return [float(m.get(key, math.nan)) for m in story.metrics]

    charts = [
        chart("loss", [Curve("training", steps, of("loss"), "line-a"), *held_out(story)]),
        chart("tokens per second", [Curve("", steps, of("tokens_per_second"), "line-a")], floor=0.0),
        memory(story, steps, of("memory_bytes"), of("memory_peak_bytes")),
        chart(
            "gradient norm, before clipping",
            [Curve("", steps, of("grad_norm"), "line-a")],
            floor=0.0,
            marks=[("clip", story.recipe.get("train", {}).get("clip"), "planned")],
        ),
        chart("learning rate", [Curve("", steps, of("lr"), "line-a")], floor=0.0),
    ]
    return [c for c in charts if c]


def held_out(story: Story) -> list[Curve]:
    """One curve for each held-out text; where there is one, it needs no name."""
    found: dict[str, Curve] = {}
    for row in story.evals:
        named = row.get("eval_losses")
        values = named if isinstance(named, dict) and len(named) > 1 else {"": row.get("eval_loss")}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                words = f"held-out {name}".strip()
                curve = found.setdefault(name, Curve(words, [], [], f"line-{'bcd'[len(found) % 3]}", True))
                curve.steps.append(float(row["step"]))
                curve.values.append(float(value))
    return list(found.values())


def memory(story: Story, steps: list[float], now: list[float], peak: list[float]) -> str:
    """Resident bytes after each step and their high-water mark, against budget and plan."""
    marks: list[tuple[str, float | None, str]] = []
    if story.on_cpu:
        highest = max(v for v in [*now, *peak] if not math.isnan(v))
        planned, budget = story.plan.get("peak_bytes"), story.budget
        marks = [("planned", planned, "planned")]
        if budget is not None and budget <= 2 * highest:
            marks.append(("budget", budget, "budget"))
    both = [Curve("highest", steps, peak, "line-b"), Curve("after a step", steps, now, "line-a")]
    return chart("resident memory of the process, GB", both, floor=0.0, marks=marks, scale=1e9)


def chart(
    title: str,
    lines: Sequence[Curve],
    *,
    floor: float | None = None,
    marks: Sequence[tuple[str, float | None, str]] = (),
    scale: float = 1.0,
) -> str:
    """One chart; empty without a finite value.

    Args:
        title: what is drawn and its unit.
        lines: the curves.
        floor: where the axis begins; None lets it begin near the lowest value.
        marks: (name, value, kind) of horizontal lines; None as value is left out. A mark far above all curves is not
            drawn.
        scale: values are divided by it.
    """
    found = [v / scale for curve in lines for v in curve.values if math.isfinite(v)]
    if not found:
        return ""
    shown = [(n, v / scale, k) for n, v, k in marks if v is not None and v / scale <= 2.5 * max(found)]
    low, high = min(found), max([*found, *(v for _, v, _ in shown)])
    pad = 0.06 * (high - low or abs(high) or 1.0)
    y = Scale(low - pad if floor is None else floor, high + pad, BOTTOM, TOP)
    last = max(s for curve in lines for s in curve.steps)
    first = min(s for curve in lines for s in curve.steps)
    x = Scale(first, max(last, first + 1), LEFT, RIGHT)
    parts = [text(LEFT - 40, 14, title, "chart-title")]
    rows = ticks(y.low, y.high, 4)
    for value in rows:
        parts.append(line(LEFT, y(value), RIGHT, y(value), "grid"))
        step = rows[1] - rows[0] if len(rows) > 1 else 0.0
        parts.append(text(LEFT - 6, y(value) + 4, number(value, step), "axis", "end"))
    for value in ticks(x.low, x.high, 6):
        if value == int(value):
            parts.append(text(x(value), BOTTOM + 16, f"{value:,.0f}", "axis", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 5, "step", "axis", "middle"))
    for curve in lines:
        parts.append(_drawn(curve, x, y, scale))
    parts += [line(LEFT, y(value), RIGHT, y(value), f"level {kind}") for _, value, kind in shown]
    parts += _names(lines, shown, y, scale)
    return picture(WIDTH, HEIGHT, parts, f"{title}, from step {first:.0f} to {last:.0f}")


def _drawn(curve: Curve, x: Scale, y: Scale, scale: float) -> str:
    """The line, through at most two points a pixel column: its lowest and its highest."""
    finite = [i for i, v in enumerate(curve.values) if math.isfinite(v)]
    steps, values = [curve.steps[i] for i in finite], [curve.values[i] / scale for i in finite]
    if not steps:
        return ""
    keep = set(thin(steps, 300, lambda i, j: i if values[i] >= values[j] else j))
    keep |= set(thin(steps, 300, lambda i, j: i if values[i] <= values[j] else j))
    points = [(x(steps[i]), y(values[i])) for i in sorted(keep)]
    dots = curve.dots or len(points) == 1
    marks = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" class="{curve.kind} dot"/>' for a, b in points] if dots else []
    return polyline(points, curve.kind) + "".join(marks)


def _names(lines: Sequence[Curve], marks: Sequence[tuple[str, float, str]], y: Scale, scale: float) -> list[str]:
    """The last value of each line and each mark, in the margin, kept apart."""
    items: list[tuple[str, float, str]] = []
    for curve in lines:
        last = next((v / scale for v in reversed(curve.values) if math.isfinite(v)), None)
        if last is not None:
            items.append((curve.name, last, curve.kind))
    items += marks
    places = apart([y(v) + 4 for _, v, _ in items], 24, TOP + 2, BOTTOM)
    found = []
    for (name, value, kind), place in zip(items, places, strict=True):
        words = format_bytes(value * scale) if scale > 1 else number(value) if abs(value) < 1e-3 else f"{value:,.4g}"
        found.append(text(RIGHT + 6, place, words, f"value {kind}"))
        if name:
            found.append(text(RIGHT + 6, place + 11, name, "level-name"))
    return found
