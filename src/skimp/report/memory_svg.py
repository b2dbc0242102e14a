"""Memory over one step as SVG: stacked layers, the process line, planned peaks and the budget, phases above."""

from __future__ import annotations

from skimp.core.units import format_bytes
from skimp.report.step_memory import SHORT, StepMemory
from skimp.report.svg import (
    Scale,
    apart,
    area,
    line,
    number,
    picture,
    polyline,
    rect,
    stepped,
    text,
    ticks,
)

WIDTH, HEIGHT = 1000, 430
LEFT, RIGHT, TOP, BOTTOM = 56, 770, 62, 388
#: A name is written inside its layer where the layer is at least this thick, in pixels.
THICK = 15


def memory_svg(memory: StepMemory) -> str:
    """The picture as one SVG element."""
    gb = 1e9 if memory.highest >= 1e9 else 1e6
    unit = "GB" if gb == 1e9 else "MB"
    x = Scale(0.0, memory.end, LEFT, RIGHT)
    y = Scale(0.0, 1.13 * memory.highest, BOTTOM, TOP)
    xs = [x(s) for s in memory.seconds]
    parts = [_grid(y, gb, unit)]
    lower = [0.0] * len(xs)
    names = []
    for category, sizes in memory.layers:
        upper = [low + size for low, size in zip(lower, sizes, strict=True)]
        css = f"layer c-{category}"
        parts.append(area(xs, [y(v) for v in lower], [y(v) for v in upper], RIGHT, css))
        names.append(_name(category, xs, [y(v) for v in lower], [y(v) for v in upper]))
        lower = upper
    if memory.planned is not None:
        parts.append(f'<path d="{stepped(xs, [y(b) for b in memory.planned], RIGHT)}" class="plan-line"/>')
    if memory.resident is not None:
        parts.append(polyline(list(zip(xs, (y(r) for r in memory.resident), strict=True)), "resident-line"))
    parts += [*names, *_levels(memory, y), _phases(memory, x), _peak(memory, xs, y), *_pointers(memory, xs)]
    parts += [text((LEFT + RIGHT) / 2, HEIGHT - 8, f"seconds into optimizer step {memory.step}", "axis", "middle")]
    marks = ticks(0.0, memory.end, 8)
    for mark in marks:
        parts.append(text(x(mark), BOTTOM + 16, number(mark, marks[-1] / max(len(marks) - 1, 1)), "axis", "middle"))
    return picture(WIDTH, HEIGHT, parts, memory.title())


def _grid(y: Scale, gb: float, unit: str) -> str:
    marks = ticks(0.0, y.high / gb, 6)
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    found = [line(LEFT, y(m * gb), RIGHT, y(m * gb), "grid") for m in marks]
    found += [text(LEFT - 6, y(m * gb) + 4, number(m, step), "axis", "end") for m in marks]
    return "".join([*found, text(LEFT - 6, TOP - 6, unit, "axis", "end")])


def _name(category: str, xs: list[float], lower: list[float], upper: list[float]) -> str:
    """The layer's name where it is thickest over the width of the word."""
    wide = 7.0 * len(category)
    best, words = -float(WIDTH), ""
    for i in range(0, len(xs), max(1, len(xs) // 200)):
        j, floor, ceiling = i, lower[i], upper[i]
        while j + 1 < len(xs) and xs[j] - xs[i] < wide:
            j += 1
            floor, ceiling = min(floor, lower[j]), max(ceiling, upper[j])
        # Where several places are as thick, the one nearest to the middle.
        score = floor - ceiling - 0.02 * abs(xs[i] + wide / 2 - (LEFT + RIGHT) / 2)
        if floor - ceiling >= THICK and score > best and xs[j] - xs[i] >= wide:
            best = score
            words = text(xs[i] + wide / 2, (floor + ceiling) / 2 + 4, category, f"name n-{category}", "middle")
    return words


def _levels(memory: StepMemory, y: Scale) -> list[str]:
    """The horizontal lines and, in the margin, their names, kept apart."""
    items = [(level.words, level.size, level.kind) for level in memory.levels]
    if memory.resident is not None:
        items.append(("measured: whole process", max(memory.resident), "resident"))
    heights = [y(size) for _, size, _ in items]
    labels = apart([h + 4 for h in heights], 28, TOP + 6, BOTTOM - 20)
    found = []
    for (words, size, kind), height, label in zip(items, heights, labels, strict=True):
        if kind != "resident":
            found.append(line(LEFT, height, RIGHT, height, f"level {kind}"))
        found.append(polyline([(RIGHT, height), (RIGHT + 10, label - 4), (RIGHT + 14, label - 4)], f"leader {kind}"))
        found.append(text(RIGHT + 18, label - 2, format_bytes(size), f"level-size {kind}"))
        found.append(text(RIGHT + 18, label + 11, words, "level-name"))
    if memory.planned is not None:
        found.append(line(RIGHT + 18, BOTTOM - 8, RIGHT + 52, BOTTOM - 8, "plan-line"))
        found.append(text(RIGHT + 58, BOTTOM - 4, "planned, block by block", "level-name"))
    if memory.beyond:
        found.append(text(RIGHT, TOP + 12, "↑ " + memory.beyond, "level-name", "end"))
    return found


def _phases(memory: StepMemory, x: Scale) -> str:
    """Two strips above the picture: micro-batches, and what each moment was spent on."""
    found = []
    if len(memory.rounds) > 1:
        for n, (name, begin, end) in enumerate(memory.rounds):
            width = x(end) - x(begin)
            found.append(rect(x(begin), 8, width - 1, 15, f"round r-{n % 2}", name))
            found.append(_fitting(x(begin), width, 19.5, (name, name.rpartition(" ")[2])))
    for name, begin, end in memory.phases:
        width = x(end) - x(begin)
        kind = name.partition(" ")[0]
        found.append(rect(x(begin), 26, width - 0.5, 15, f"phase p-{kind}", f"{name}: {end - begin:.2f} s"))
        found.append(_fitting(x(begin), width, 37.5, (name, SHORT.get(name, name))))
        if width > 12:
            found.append(line(x(begin), 42, x(begin), BOTTOM, "cut"))
    return "".join(found)


def _fitting(left: float, width: float, y: float, choices: tuple[str, ...]) -> str:
    """The longest of the choices that fits a strip, or nothing."""
    for words in choices:
        if 6.2 * len(words) + 4 <= width:
            return text(left + width / 2, y, words, "strip", "middle")
    return ""


def _peak(memory: StepMemory, xs: list[float], y: Scale) -> str:
    """A ring at the fullest moment and its address in the headroom above."""
    place, total = xs[memory.peak], memory.top[memory.peak]
    words = f"fullest: {format_bytes(total)}, {memory.where}"
    half = 3.2 * len(words)
    label = min(max(place, LEFT + half), RIGHT - half)
    height = y(total)
    return "".join(
        [
            line(place, TOP + 8, place, height - 5, "peak-line"),
            f'<circle cx="{place:.1f}" cy="{height:.1f}" r="5" class="peak"/>',
            text(label, TOP + 2, words, "peak-name", "middle"),
        ]
    )


def _pointers(memory: StepMemory, xs: list[float]) -> list[str]:
    """Invisible columns that tell a pointer what is there: about 150 of them."""
    every, top = max(1, len(xs) // 150), memory.top
    found = []
    for i in range(0, len(xs), every):
        end = xs[i + every] if i + every < len(xs) else RIGHT
        fullest = max(range(i, min(i + every, len(xs))), key=lambda j: top[j])
        told = f"{memory.seconds[fullest]:.2f} s: {format_bytes(top[fullest])}"
        if memory.owners[fullest]:
            told += f" at {memory.owners[fullest]}"
        sizes = sorted(((sizes[fullest], name) for name, sizes in memory.layers), reverse=True)
        told += "".join(f"\n{name} {format_bytes(size)}" for size, name in sizes if size)
        found.append(rect(xs[i], TOP, end - xs[i], BOTTOM - TOP, "pointer", told))
    return found
