"""Accuracy over memory, a dot a method with its standard error, as SVG: what the fine-tuning benchmark draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skimp.core.units import format_bytes
from skimp.report.svg import Scale, apart, line, number, picture, text, ticks

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 56, 600, 44, 366
STYLE = """<style>text{font:12px sans-serif;fill:#1b1f23}.t{font-weight:bold}.g{stroke:#e3e6e9}.e{stroke:#2f8f6f}
.p{fill:#2f8f6f}.l{stroke:#9aa0a6;stroke-width:.7}.u{stroke:#c62828;stroke-dasharray:5 4}.r{fill:#c62828}</style>"""


def methods_svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """The picture.

    Args:
        rows: of the benchmark's table. Those with `peak` (bytes) are dots at `accuracy["mean"]`, `error["mean"]` up and
            down; others with an accuracy are dashed lines across.
    """
    dots = [row for row in rows if "peak" in row]
    across = [row for row in rows if "peak" not in row and "accuracy" in row]
    peaks = [row["peak"] / 1e6 for row in dots] or [1.0]
    wide = max(peaks) - min(peaks) or max(peaks)
    x = Scale(min(peaks) - 0.06 * wide, max(peaks) + 0.06 * wide, LEFT, RIGHT)
    y = Scale(0.0, 100.0, BOTTOM, TOP)
    parts = [STYLE, text(LEFT, 20, title, "t"), text(LEFT, 36, "% of answers right, mean of tasks")]
    for value in ticks(0, 100, 5):
        parts += [line(LEFT, y(value), RIGHT, y(value), "g"), text(LEFT - 6, y(value) + 4, number(value), "", "end")]
    for value in ticks(x.low, x.high, 7):
        parts.append(text(x(value), BOTTOM + 18, number(value), "", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 12, "MB of tensors at the peak of a step", "", "middle"))
    for row in across:
        at = y(100 * row["accuracy"]["mean"])
        parts += [line(LEFT, at, RIGHT, at, "u"), text(LEFT + 6, at - 4, row["method"], "r")]
    places = apart([y(100 * row["accuracy"]["mean"]) for row in dots], 15.0, TOP, BOTTOM)
    for row, place in zip(dots, places, strict=True):
        at, middle, error = x(row["peak"] / 1e6), 100 * row["accuracy"]["mean"], 100 * row["error"]["mean"]
        words = f"{row['method']}: {middle:.1f} ± {error:.1f} %, {format_bytes(row['peak'])}"
        parts += [
            line(at, y(min(100.0, middle + error)), at, y(max(0.0, middle - error)), "e"),
            line(at, y(middle), RIGHT + 8, place, "l"),
            f'<circle cx="{at:.1f}" cy="{y(middle):.1f}" r="4" class="p"><title>{words}</title></circle>',
            text(RIGHT + 12, place + 4, row["method"]),
        ]
    return picture(WIDTH, HEIGHT, parts, title)
