"""Several frontiers in one picture."""

from __future__ import annotations

import re
from typing import Any

from skimp.report.frontiers import frontiers_svg


def plan(name: str, budget: float, points: list[tuple[float, float]], fits: bool = True) -> dict[str, Any]:
    return {
        "fits": fits, "peak_bytes": int(points[0][0] * 1e9), "predicted_step_seconds": points[0][1],
        "frontier": [{"peak_bytes": size * 1e9, "seconds": seconds} for size, seconds in points],
        "places": {"device": {"name": name, "budget_bytes": budget * 1e9}},
    }  # fmt: skip


def test_each_card_has_its_line_its_budget_and_its_plan() -> None:
    plans = [plan("a", 24, [(10, 3.0), (20, 2.0)]), plan("b", 48, [(10, 1.5), (40, 1.0), (90, 0.5)])]
    drawing = frontiers_svg(plans, "a model", ["24GB", "48 <GB>"])
    assert drawing.count("<path") == 2
    assert drawing.count("<circle") == drawing.count('class="b"') == 2
    assert "48 &lt;GB&gt;: 10.0 GB, 1.5 s" in drawing
    assert "GB reserved on the card" in drawing
    assert "does not fit" not in drawing
    # What lies beyond every budget is not drawn: it would press the rest into a corner.
    xs = [float(x) for x in re.findall(r"[MH](\d+\.\d)", drawing)]
    assert max(xs) <= 740


def test_budgets_of_one_machine_share_a_curve() -> None:
    points = [(1.0, 3.0), (2.0, 2.0)]
    plans = [plan("cpu", budget, points, fits=budget > 1) for budget in (0.9, 1.5, 2.5)]
    drawing = frontiers_svg(plans, "a model", ["x", "y", "z"])
    assert drawing.count("<path") == 1
    assert drawing.count("<circle") == 3
    assert drawing.count("does not fit") == 2, "in the legend and for a pointer"
    assert "GB of the whole process" in drawing
