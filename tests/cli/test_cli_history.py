"""A run leaves a line in this machine's log; the next plan and the doctor tell of it; a log that fails, fails alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skimp.plan import history

Skimp = Callable[..., Any]


def test_a_run_is_remembered_and_the_next_plan_says_so(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    path = write_recipe({"train.steps": 4, "report": False, "output": str(tmp_path / "run")})
    assert skimp("train", path, "--quiet").code == 0
    (row,) = history.read()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert row["kind"] == "run"
    assert row["measured"]["process"] == summary["rss_peak_bytes"]
    assert row["measured"]["tensors"] == summary["measured_peak_bytes"]
    assert row["planned"]["process"] == summary["planned_rss_bytes"]
    assert row["shape"]["micro_rows"] == summary["plan"]["chosen"]["micro_rows"]
    assert (row["measured"]["steps"], row["measured"]["survived"], row["machine"]) == (4, 0, history.machine())
    seconds = [json.loads(x)["seconds"] for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["measured"]["seconds"] == pytest.approx(sum(seconds[2:]) / 2)
    done = skimp("plan", path, f"output={tmp_path / 'other'}", columns=200)
    assert done.code == 0
    assert "by earlier runs here" in done.out
    assert "over 1 run" in done.out
    # Another number of steps is the same shape; another length is not.
    assert history.digest(_recipe(path, "train.steps=9")) == row["recipe"]
    assert history.digest(_recipe(path, "data.seq_len=16")) != row["recipe"]


def _recipe(path: str, override: str) -> Any:
    from skimp.recipe import load_recipe

    return load_recipe(path, [override])


def test_a_log_that_cannot_be_written_is_said_once_and_stops_nothing(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_once: None
) -> None:
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "history").write_text("not a folder")
    done = skimp(
        "train", write_recipe({"train.steps": 2, "report": False, "output": str(tmp_path / "run")}), columns=200
    )
    assert done.code == 0, done.err
    assert done.out.count("planned against measured is not remembered") == 1
    assert (tmp_path / "run" / "summary.json").is_file()


def test_a_probe_of_a_card_is_refused_before_anything_is_planned(
    skimp: Skimp, write_recipe: Callable[..., str]
) -> None:
    done = skimp("plan", write_recipe(), "--probe", "--gpu", "24GB")
    assert (done.code, done.out) == (2, "")
    assert "steps are taken on this machine's CPU" in done.err


@pytest.mark.slow
def test_a_probe_prints_planned_beside_measured(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    done = skimp("plan", write_recipe(), "--probe", "--json")
    told = json.loads(done.out)
    assert done.code == 0
    assert told["probe"]["tensors_bytes"] == told["phases"]["train"]
    assert [row["kind"] for row in history.read()] == ["probe"]


def test_a_run_that_breaks_off_is_in_the_log_and_teaches_nothing(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_once: None
) -> None:
    from skimp.core.errors import OutOfMemory
    from skimp.plan.places import earlier

    def short(*_: Any, **__: Any) -> None:
        raise OutOfMemory("a step", "no more")

    monkeypatch.setenv("SKIMP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("skimp.run.session.train", short)
    done = skimp("train", write_recipe({"output": str(tmp_path / "run")}), "--quiet")
    assert done.code == 3
    (row,) = history.read()
    assert row["measured"]["stopped"] == "OutOfMemory"
    assert row["measured"]["process"] > 0
    assert earlier().errors == earlier().ratios == ()
