"""The frontier of a plan, memory against time, as SVG; `report.png` has it as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skimp.core.units import format_bytes
from skimp.report.svg import Scale, line, number, picture, text, ticks

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 600, 44, 326
STYLE = """<style>text{font:12px sans-serif;fill:#1b1f23}.t{font-weight:bold}.g{stroke:#e3e6e9}
.b{stroke:#c62828;stroke-width:1.5}.f{fill:none;stroke:#2f8f6f;stroke-width:2}.c{fill:#c62828}.p{fill:#2f8f6f}
.bt{fill:#c62828}</style>"""


def frontier_svg(plan: Mapping[str, Any]) -> str:
    """A stepped line: for a budget on the horizontal axis, the seconds of the fastest run within it.

    Args:
        plan: `Plan.as_dict()` with its "frontier".
    """
    points = [(p["peak_bytes"] / 1e9, p["seconds"]) for p in plan["frontier"]]
    budget = plan["places"]["device"]["budget_bytes"] / 1e9
    chosen = (plan["peak_bytes"] / 1e9, plan["predicted_step_seconds"])
    x, y = _scales(points, budget, chosen)
    parts = [
        STYLE,
        text(LEFT, 20, f"{plan['model']}: seconds of a step over memory ({plan['places']['device']['name']})", "t"),
    ]
    for value in ticks(y.low, y.high, 5):
        parts += [line(LEFT, y(value), RIGHT, y(value), "g"), text(LEFT - 6, y(value) + 4, number(value), "", "end")]
    for value in ticks(x.low, x.high, 8):
        parts.append(text(x(value), BOTTOM + 18, number(value), "", "middle"))
    parts.append(
        text(
            (LEFT + RIGHT) / 2,
            HEIGHT - 12,
            "GB of the whole process" if on_cpu(plan) else "GB on the card",
            "",
            "middle",
        )
    )
    path = f"M{x(points[0][0]):.1f},{TOP}" if points else ""
    for size, seconds in points:
        path += f"H{x(size):.1f}V{y(seconds):.1f}"
    parts.append(f'<path d="{path}H{RIGHT}" class="f"/>')
    for (size, seconds), point in zip(points, plan["frontier"], strict=True):
        parts.append(
            f'<circle cx="{x(size):.1f}" cy="{y(seconds):.1f}" r="3" class="p"><title>{format_bytes(size * 1e9)}, '
            f"{seconds:.3g} s: micro-batch {point['chosen']['micro_rows']}, "
            f"{len(point['chosen']['recompute'])} blocks recomputed</title></circle>"
        )
    if x.low <= budget <= x.high:
        parts += [line(x(budget), TOP, x(budget), BOTTOM, "b"), text(x(budget) - 5, TOP + 12, "budget", "bt", "end")]
    parts.append(f'<circle cx="{x(chosen[0]):.1f}" cy="{y(chosen[1]):.1f}" r="5" class="c"/>')
    return picture(WIDTH, HEIGHT, parts, f"frontier of {plan['model']}")


def on_cpu(plan: Mapping[str, Any]) -> bool:
    """Whether the plan is for this process, not for a card."""
    return bool(plan["places"]["device"]["name"] == "cpu")


def is_near(budget: float, sizes: list[float]) -> bool:
    """Whether a budget is drawn beside such sizes; one far above would press them into a corner."""
    return budget <= 1.5 * max(sizes)


def _scales(points: list[tuple[float, float]], budget: float, chosen: tuple[float, float]) -> tuple[Scale, Scale]:
    """The axes: around the points and the choice; a budget far above them is left out."""
    sizes, seconds = [p[0] for p in (*points, chosen)], [p[1] for p in (*points, chosen)]
    if is_near(budget, sizes):
        sizes.append(budget)
    wide, tall = max(sizes) - min(sizes) or max(sizes), max(seconds) - min(seconds) or max(seconds)
    return (
        Scale(min(sizes) - 0.04 * wide, max(sizes) + 0.04 * wide, LEFT, RIGHT),
        Scale(max(0.0, min(seconds) - 0.1 * tall), max(seconds) + 0.1 * tall, BOTTOM, TOP),
    )
