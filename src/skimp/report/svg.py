"""The few shapes a report draws, as SVG text: scales with round ticks, lines, stepped areas, labels that keep apart.

Colours are CSS classes, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        width = self.high - self.low or 1.0
        return self.start + (value - self.low) / width * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within [low, high]: 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    raw = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float, step: float = 0.0) -> str:
    """A tick as short as it can be: '0.5', '2,000', '2e-05'; `step` is the distance of ticks."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.3g}"
    digits = 0 if not step or step >= 1 else min(6, math.ceil(-math.log10(step) + (step * 10 % 1 > 1e-9)))
    if step >= 1 and step % 1:
        digits = 1
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Words at a place; `kind` is CSS classes."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{where}{css}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle; `title` is what a pointer held over it is told."""
    inside = f"><title>{escape(title)}</title></rect>" if title else "/>"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" class="{kind}"{inside}'


def polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    if not points:
        return ""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{kind}"/>'


def stepped(xs: Sequence[float], ys: Sequence[float], end: float) -> str:
    """Path commands of a line that holds each value until the next point, and the last one until `end`."""
    path = [f"M{xs[0]:.1f},{ys[0]:.1f}"]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        path.append(f"H{x:.1f}V{y:.1f}")
    return "".join([*path, f"H{end:.1f}"])


def area(xs: Sequence[float], lower: Sequence[float], upper: Sequence[float], end: float, kind: str) -> str:
    """The stepped area between two lines over the same points."""
    path = stepped(xs, upper, end)
    x = end
    back = [f"V{lower[-1]:.1f}"]
    for i in range(len(xs) - 1, -1, -1):
        x = xs[i]
        back.append(f"H{x:.1f}" + (f"V{lower[i - 1]:.1f}" if i else ""))
    return f'<path d="{path}{"".join(back)}Z" class="{kind}"/>'


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, `gap` apart and within [low, high], in the same order from top to bottom."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    below = low - gap
    for i in order:
        below = placed[i] = max(wanted[i], below + gap)
    above = high + gap
    for i in reversed(order):
        above = placed[i] = min(placed[i], above - gap)
    return placed


def thin(xs: Sequence[float], columns: int, better: Callable[[int, int], int]) -> list[int]:
    """Indices of one point per pixel column of `columns` equal ones; `better(i, j)` says which of two stays."""
    if len(xs) <= columns:
        return list(range(len(xs)))
    width = (xs[-1] - xs[0]) / columns or 1.0
    kept: dict[int, int] = {}
    for i, x in enumerate(xs):
        column = int((x - xs[0]) / width)
        kept[column] = better(kept[column], i) if column in kept else i
    return list(kept.values())


def picture(width: int, height: int, parts: Sequence[str], label: str) -> str:
    """The whole drawing; `label` is read to those who do not see it."""
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )
