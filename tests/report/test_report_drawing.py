"""The shapes and the numbers behind them: ticks, labels, thinning, phases, what is drawn of a step."""

from __future__ import annotations

import dataclasses
import itertools
import random
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report_cases import GB, plan, run_folder, timeline  # noqa: F401

from skimp.report import svg
from skimp.report.curves import Curve, chart, held_out
from skimp.report.gather import Story, gather, rounds, segments
from skimp.report.memory_svg import memory_svg
from skimp.report.step_memory import step_memory


@pytest.mark.parametrize("low", [0.0, 0.3, -2.0])
@pytest.mark.parametrize("width", [3e-6, 0.07, 1.0, 2.4, 99.0, 5e7])
def test_ticks_are_round_few_and_inside(low: float, width: float) -> None:
    found = svg.ticks(low, low + width)
    assert 2 <= len(found) <= 11
    assert all(low - 1e-9 * width <= t <= low + width * (1 + 1e-9) for t in found)
    step = found[1] - found[0]
    assert all(abs((b - a) / step - 1) < 1e-6 for a, b in itertools.pairwise(found))
    assert svg.ticks(1.0, 1.0) == [1.0]


@pytest.mark.parametrize(
    ("value", "step", "words"),
    [(0.0, 0.5, "0"), (0.5, 0.5, "0.5"), (1.5, 0.25, "1.5"), (2000.0, 500.0, "2,000"), (2e-5, 1e-5, "2e-05"),
     (2.25, 0.25, "2.25"), (2.5, 2.5, "2.5"), (12.0, 2.0, "12")],
)  # fmt: skip
def test_numbers_of_an_axis(value: float, step: float, words: str) -> None:
    assert svg.number(value, step) == words


def test_labels_keep_apart_in_order_and_inside() -> None:
    rng = random.Random(3)
    for _ in range(200):
        wanted = [rng.uniform(0, 100) for _ in range(rng.randint(1, 6))]
        placed = svg.apart(wanted, 12, 0, 100)
        order = sorted(range(len(wanted)), key=lambda i: wanted[i])
        gaps = [placed[b] - placed[a] for a, b in itertools.pairwise(order)]
        assert all(g >= 12 - 1e-9 for g in gaps)
        assert all(-1e-9 <= p <= 100 + 1e-9 for p in placed)
    assert svg.apart([10, 50, 90], 12, 0, 100) == [10, 50, 90]


def test_thinning_keeps_the_extremes() -> None:
    xs = [i / 7 for i in range(10_000)]
    values = [random.Random(i).random() for i in range(10_000)]
    kept = svg.thin(xs, 50, lambda i, j: i if values[i] >= values[j] else j)
    assert 50 <= len(kept) <= 51
    assert kept == sorted(kept)
    assert max(values) in [values[i] for i in kept]


def test_phases_and_micro_batches_of_a_step() -> None:
    runs = segments(timeline())
    names = [name for name, _, _ in runs]
    assert names == ["ready", "forward", "backward", "forward", "backward", "step"]
    assert [b + 1 for _, _, b in runs[:-1]] == [a for _, a, _ in runs[1:]]
    assert [(a, b) for a, b in rounds(runs)] == [(1, 3), (4, 6)]


def test_what_is_drawn_of_a_step(run_folder: Path) -> None:  # noqa: F811
    story = gather(run_folder)
    memory = step_memory(story)
    assert memory is not None
    assert [name for name, _ in memory.layers] == ["process", "weights", "gradients", "activations"]
    assert memory.top[memory.peak] == 15 * GB // 10 == max(memory.top)
    assert memory.where == "backward, block 0 (aten::mm)"
    assert [(level.kind, level.size) for level in memory.levels] == [
        ("planned", 15 * GB // 10), ("planned", 16 * GB // 10), ("budget", 2 * GB),
    ]  # fmt: skip
    assert memory.planned is not None
    for planned, measured, phase in zip(memory.planned[1:7], memory.top[1:7], range(1, 7), strict=True):
        assert planned >= measured, phase
    assert [name for name, _, _ in memory.rounds] == ["micro-batch 1", "micro-batch 2"]
    in_backward = dataclasses.replace(story, plan=plan(chosen={"in_backward": True}))
    again = step_memory(in_backward)
    assert again is not None
    assert [name for name, _, _ in again.rounds] == ["pass 1", "pass 2"]
    assert "backward and step" in [name for name, _, _ in again.phases]
    assert step_memory(dataclasses.replace(story, timeline=None)) is None


def test_a_step_that_ran_under_another_plan_is_not_held_against_this_one(run_folder: Path) -> None:  # noqa: F811
    story = gather(run_folder)
    assert story.timeline is not None
    other = dataclasses.replace(story, timeline={**story.timeline, "chosen": {"micro_rows": 7}})
    memory = step_memory(other)
    assert memory is not None
    assert memory.planned is None
    assert [level.kind for level in memory.levels] == ["budget"]
    assert step_memory(dataclasses.replace(story, timeline={**story.timeline, "chosen": story.plan["chosen"]})) == (
        step_memory(story)
    )


def test_a_far_budget_is_named_and_not_drawn_and_a_card_has_no_process(run_folder: Path) -> None:  # noqa: F811
    story = gather(run_folder)
    places = {"device": {"name": "rtx-4090", "budget_bytes": 24 * GB}, "host": {"baseline_bytes": GB}}
    card = step_memory(dataclasses.replace(story, plan=plan(places=places)))
    assert card is not None
    assert card.beyond == "budget of rtx-4090: 24.0 GB, far above this picture"
    assert next(name for name, _ in card.layers) == "weights"
    assert card.resident is None
    assert card.highest == 11 * GB // 10
    assert card.beyond in memory_svg(card)


def test_the_picture_is_well_formed_and_inside_its_frame(run_folder: Path) -> None:  # noqa: F811
    memory = step_memory(gather(run_folder))
    assert memory is not None
    root = ET.fromstring(memory_svg(memory))
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("weights", "backward", "micro-batch 2", "budget", "2.00 GB", "planned: whole process",
                   "fullest: 1.50 GB, backward, block 0 (aten::mm)", "GB"):  # fmt: skip
        assert wanted in words, wanted
    for shape in root.iter("{http://www.w3.org/2000/svg}text"):
        assert 0 <= float(shape.get("x", "0")) <= 1000
        assert 0 <= float(shape.get("y", "0")) <= 430
    areas = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if "layer" in p.get("class", "")]
    assert len(areas) == 4
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("at block 0" in t and "activations 400 MB" in t for t in titles)


def test_a_chart_survives_odd_numbers() -> None:
    nan = float("nan")
    ET.fromstring(chart("loss", [Curve("", [1.0], [2.0], "line-a")]))
    ET.fromstring(chart("loss", [Curve("", [1.0, 2.0, 3.0], [2.0, nan, float("inf")], "line-a")]))
    ET.fromstring(chart("flat", [Curve("", [1.0, 2.0], [0.0, 0.0], "line-a")], floor=0.0))
    assert chart("nothing", [Curve("", [1.0], [nan], "line-a")]) == ""
    long = Curve("", [float(i) for i in range(50_000)], [float(i % 977) for i in range(50_000)], "line-a")
    drawn = chart("long", [long])
    assert len(drawn) < 40_000
    line = ET.fromstring(drawn).find("{http://www.w3.org/2000/svg}polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line.get("points", "").split()]
    assert max(heights) - min(heights) > 150  # from 0 to 976, whatever column each is in


def test_every_held_out_text_has_its_curve() -> None:
    rows = [{"step": 0, "eval_loss": 2.0, "eval_losses": {"code": 2.0, "prose": 3.0}}, {"step": 4, "eval_loss": 1.5}]
    story = Story(Path("x"), {}, {}, {}, [], rows)
    assert [(c.name, c.values) for c in held_out(story)] == [
        ("held-out code", [2.0]), ("held-out prose", [3.0]), ("held-out", [1.5]),
    ]  # fmt: skip
