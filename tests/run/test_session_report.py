"""A session draws its report at its end, from what it left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, lines, merged

import skimp.api
from skimp.report.gather import gather, totals
from skimp.report.step_memory import step_memory

pytestmark = pytest.mark.usefixtures("plan_once")


def test_a_session_ends_with_its_pictures(recipe: dict[str, Any]) -> None:
    voice = Heard()
    outcome = skimp.api.train(merged(recipe, {"report": True}), voice=voice)
    page = (outcome.folder / "report.html").read_text()
    assert f"report: {outcome.folder / 'report.html'}" in voice.said
    assert "step 6 of 6" in page
    assert f"{outcome.summary['eval_loss_before']:.3f} → {outcome.summary['eval_loss_after']:.3f}" in page


def test_the_watched_step_is_the_one_that_was_planned(recipe: dict[str, Any]) -> None:
    """Every point lies at or under what the plan foretold for its phase and block, and the highest reaches it."""
    outcome = skimp.api.train(recipe)
    story = gather(outcome.folder)
    assert story.timeline is not None
    assert story.timeline["step"] == 2
    assert max(totals(story.timeline)) == outcome.summary["measured_peak_bytes"] == story.timeline["peak"]["total"]
    memory = step_memory(story, columns=10**9)
    assert memory is not None
    assert memory.planned is not None
    inside = [i for i, name in enumerate(story.timeline["phase"]) if story.timeline["phases"][name]]
    # Rows are planned as their costliest split into documents; bookkeeping of other splits is some bytes more or less.
    assert all(memory.top[i] <= memory.planned[i] * 1.001 for i in inside)
    assert max(memory.planned) == pytest.approx(memory.top[memory.peak], rel=1e-3)
    assert [name for name, _, _ in memory.rounds] == ["micro-batch 1", "micro-batch 2"]


def test_a_resumed_run_is_drawn_whole(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = merged(recipe, {"checkpoint.every": 2, "eval.every": 2})
    skimp.api.train(recipe, voice=Heard(stop_at=3))
    outcome = skimp.api.train(merged(recipe, {"report": True}), resume=True)
    story = gather(outcome.folder)
    assert [m["step"] for m in story.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in story.evals] == [0, 2, 4, 6]
    assert story.timeline is not None
    assert story.timeline["step"] == 5  # the second of the second process
    peaks = [m["memory_peak_bytes"] for m in lines(outcome.folder / "metrics.jsonl")]
    assert story.resident_peak == max(*peaks, outcome.summary["rss_peak_bytes"])
    assert (outcome.folder / "report.html").is_file()


def test_a_report_that_fails_is_said_and_costs_nothing(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    voice = Heard()
    folder = Path(recipe["output"])
    folder.mkdir()
    skimp.api.draw(folder, voice)
    assert len(voice.said) == 1
    assert voice.said[0].endswith(f"the run is complete; make it again: skimp report {folder}")


def test_the_held_out_losses_before_and_after_are_lines_of_their_own(recipe: dict[str, Any]) -> None:
    outcome = skimp.api.train(recipe)
    rows = lines(outcome.folder / "evals.jsonl")
    assert [(row["step"], row["eval_loss"]) for row in rows] == [
        (0, outcome.summary["eval_loss_before"]),
        (6, outcome.summary["eval_loss_after"]),
    ]
    assert json.loads((outcome.folder / "summary.json").read_text())["steps"] == 6
