"""`skimp plan --html --png --markdown`: files and forms of a plan, refused before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Skimp = Callable[..., Any]


def test_page_picture_and_markdown_of_one_plan(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, plan_once: None
) -> None:
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    done = skimp("plan", write_recipe(), "--html", str(page), "--png", str(picture), "--markdown")
    assert done.code == 0, done.err
    assert done.out.startswith("**")
    assert f"plan: {page}" in done.err
    assert "timeline-data" in page.read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("plan")) == ["plan.html", "plan.png"]


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path, option: str
) -> None:
    for name, found in ((tmp_path / "none" / "plan", "no folder"), (tmp_path, "a folder")):
        done = skimp("plan", write_recipe(), option, str(name))
        assert (done.code, done.out) == (2, "")
        assert found in done.err
        assert option in done.err


def test_two_forms_of_one_answer_are_refused(skimp: Skimp, write_recipe: Callable[..., str]) -> None:
    done = skimp("plan", write_recipe(), "--markdown", "--json")
    assert (done.code, done.out) == (2, "")
