"""Several frontiers in one picture: memory against time on several cards, or one curve with the plans of several
budgets on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from skimp.core.units import format_bytes
from skimp.report.frontier_picture import on_cpu
from skimp.report.svg import Scale, line, number, picture, text, ticks

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 64, 740, 92, 372
#: Told apart by people who see few colours, and in grey by their order.
COLOURS = ("#1f5fbf", "#c2571a", "#2f8f6f", "#8a3ffc", "#6f6f6f")
STYLE = """<style>text{font:12px sans-serif;fill:#1b1f23}.t{font-weight:bold}.g{stroke:#e3e6e9}
.b{stroke-width:1;stroke-dasharray:4 3}.f{fill:none;stroke-width:2}</style>"""


def frontiers_svg(plans: Sequence[Mapping[str, Any]], title: str, names: Sequence[str]) -> str:
    """A stepped line a curve: for a budget on the horizontal axis, the seconds of the fastest run within it; a dashed
    line is a budget, a dot the plan for it.

    Args:
        plans: `Plan.as_dict()` with their "frontier", one a budget. Plans with the same curve share one line.
        title: above the picture.
        names: of the plans, in their order.
    """
    curves = [[(p["peak_bytes"] / 1e9, p["seconds"]) for p in plan["frontier"]] for plan in plans]
    budgets = [plan["places"]["device"]["budget_bytes"] / 1e9 for plan in plans]
    dots = [(plan["peak_bytes"] / 1e9, plan["predicted_step_seconds"]) for plan in plans]
    most = 1.06 * max([*budgets, *(size for size, _ in dots)])
    inside = [point for curve in curves for point in curve if point[0] <= most] + dots
    x = Scale(0.9 * min([*(size for size, _ in inside), *budgets]), most, LEFT, RIGHT)
    slowest, fastest = max(s for _, s in inside), min(s for _, s in inside)
    margin = 0.08 * (slowest - fastest or slowest)
    y = Scale(max(0.0, fastest - margin), slowest + margin, BOTTOM, TOP)
    parts = [STYLE, text(LEFT, 20, title, "t"), text(LEFT, TOP - 8, "seconds of a step")]
    for value, label in _labelled(ticks(y.low, y.high, 6)):
        parts += [line(LEFT, y(value), RIGHT, y(value), "g"), text(LEFT - 6, y(value) + 4, label, "", "end")]
    across = _labelled(ticks(x.low, x.high, 8))
    parts += [text(x(value), BOTTOM + 18, label, "", "middle") for value, label in across]
    where = "GB of the whole process" if on_cpu(plans[0]) else "GB reserved on the card"
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, where, "", "middle"))
    drawn: list[list[tuple[float, float]]] = []
    for index, (plan, name, curve) in enumerate(zip(plans, names, curves, strict=True)):
        colour = COLOURS[index % len(COLOURS)]
        shown = [point for point in curve if point[0] <= most]
        if shown and curve not in drawn:
            drawn.append(curve)
            parts.append(f'<path d="{_steps(shown, x, y)}" class="f" stroke="{colour}"/>')
        parts.append(f'<g stroke="{colour}">{line(x(budgets[index]), TOP, x(budgets[index]), BOTTOM, "b")}</g>')
        size, seconds = dots[index]
        verdict = f"{format_bytes(plan['peak_bytes'])}, {seconds:.3g} s" + ("" if plan["fits"] else ": does not fit")
        parts.append(
            f'<circle cx="{x(size):.1f}" cy="{y(seconds):.1f}" r="5" fill="{colour if plan["fits"] else "none"}" '
            f'stroke="{colour}"><title>{escape(name)}: {verdict}</title></circle>'
        )
        column, row = index % 2, index // 2
        at, level = LEFT + 340 * column, 38 + 16 * row
        parts.append(f'<rect x="{at}" y="{level - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(text(at + 16, level, f"{name}: {verdict}"))
    return picture(WIDTH, HEIGHT, parts, title)


def _labelled(values: list[float]) -> list[tuple[float, str]]:
    step = values[1] - values[0] if len(values) > 1 else 0.0
    return [(value, number(value, step)) for value in values]


def _steps(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    (first, seconds), *rest = points
    path = f"M{x(first):.1f},{y(seconds):.1f}"
    for size, spent in rest:
        path += f"H{x(size):.1f}V{y(spent):.1f}"
    return f"{path}H{RIGHT}"
