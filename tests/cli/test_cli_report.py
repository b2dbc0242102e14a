"""`skimp report RUN` on a run that is there, and on a folder that is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "report"))

from report_cases import run_folder  # noqa: F401

Skimp = Callable[..., Any]


def test_it_draws_again_and_says_what(skimp: Skimp, run_folder: Path) -> None:  # noqa: F811
    done = skimp("report", str(run_folder))
    assert (done.code, done.err) == (0, "")
    assert f"report: {run_folder / 'report.html'}" in done.out
    assert (run_folder / "report.html").is_file()
    assert ("memory.png" in done.out) == (run_folder / "memory.png").exists() or "skimp[report]" in done.out


def test_a_folder_that_is_no_run(skimp: Skimp, tmp_path: Path) -> None:
    done = skimp("report", str(tmp_path))
    assert done.code == 2
    assert "no recipe.json" in done.err
    assert "Traceback" not in done.err
    (tmp_path / "recipe.json").write_text(json.dumps({}))
    done = skimp("report", str(tmp_path))
    assert (done.code, list(tmp_path.iterdir())) == (2, [tmp_path / "recipe.json"])
    assert "skimp doctor" in done.err
