"""The page and the PNG of a run's folder: complete, self-contained, honest about what is missing."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_cases import metrics, run_folder, write_lines  # noqa: F401

from skimp.core.errors import CheckpointError
from skimp.report import make, start
from skimp.report.gather import gather

VOID = {"meta", "br", "link", "img"}


class Nested(HTMLParser):
    """Fails on a tag that is closed out of turn; collects text and whatever might fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "data", "srcset")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img", "object") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(path: Path) -> tuple[Nested, str]:
    text = path.read_text(encoding="utf-8")
    parser = Nested()
    parser.feed(text)
    assert parser.open == []
    return parser, text


def test_the_page_is_whole_and_fetches_nothing(run_folder: Path) -> None:  # noqa: F811
    said = make.make(run_folder)
    assert said[0] == f"report: {run_folder / 'report.html'}"
    parser, text = read(run_folder / "report.html")
    assert set(parser.fetched) <= {"script"}  # inline ones, which name no source
    assert "url(" not in text
    assert "@import" not in text
    words = " ".join(" ".join(parser.words).split())
    for part in (
        "finished", "step 6 of 6", "tiny <model>", "125,000,000 parameters", "1.50 GB", "planned 1.60 GB: -6.2 %",
        "3.500 → 3.125", "768 tokens", "26 tokens/s", "Memory over one step (the 2nd)", "recompute 1 of 1 blocks",
        "say & go", "<b>once", "layers.*.w", "12", "torch", "no recompute", "exact.recompute=0", "clip: 1.0",
        "step 3: memory ran short & was found",
        "1,234", "48,800", "train: 3 empty", "train: 2 documents truncated", "a note of the data", "q_proj", "192 B",
    ):  # fmt: skip
        assert part in words, part
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_png_is_a_picture_of_its_size(run_folder: Path) -> None:  # noqa: F811
    pytest.importorskip("matplotlib")
    make.make(run_folder)
    data = (run_folder / "memory.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1500, 660)
    assert not list(run_folder.glob("*.tmp-*"))


def test_without_matplotlib_the_page_is_made_and_the_way_is_told(
    run_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = make.make(run_folder)
    assert (run_folder / "report.html").is_file()
    assert not (run_folder / "memory.png").exists()
    assert "pip install 'skimp[report]'" in said[1]
    assert f"skimp report {run_folder}" in said[1]


def test_a_run_that_died_has_its_page(run_folder: Path) -> None:  # noqa: F811
    for name in ("summary.json", "timeline.json", "evals.jsonl", "plan.json"):
        (run_folder / name).unlink()
        make.make(run_folder)
        read(run_folder / "report.html")
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # what a death leaves
    make.make(run_folder)
    words = " ".join(read(run_folder / "report.html")[0].words)
    assert "did not come to its end" in words
    assert "no step of this run was watched" in words.lower()
    assert gather(run_folder).steps == 6


def test_a_longer_run_keeps_its_page_small(run_folder: Path) -> None:  # noqa: F811
    write_lines(run_folder / "metrics.jsonl", metrics(20_000))
    make.make(run_folder)
    assert (run_folder / "report.html").stat().st_size < 400_000


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("recipe.json", None, "no recipe.json"),
        ("metrics.jsonl", None, "no finished step"),
        ("summary.json", "{", "damaged"),
        ("plan.json", "[1]", "damaged"),
        ("metrics.jsonl", "7\n", "damaged"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(run_folder: Path, name: str, text: str | None, found: str) -> None:  # noqa: F811
    path = run_folder / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        make.make(run_folder)
    assert found in str(caught.value)
    assert caught.value.instead


def test_the_child_says_what_it_made_or_why_not(run_folder: Path) -> None:  # noqa: F811
    assert start.make(run_folder)[0] == f"report: {run_folder / 'report.html'}"
    (run_folder / "plan.json").write_text("{")
    said = start.make(run_folder)
    assert len(said) == 1
    assert "the report was not made" in said[0]
    assert "the run is complete" in said[0]
    assert said[0].endswith(f"skimp report {run_folder}")


def test_a_child_that_cannot_start_loses_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(sys, "executable", str(run_folder / "no python"))
    assert "the report was not made" in start.make(run_folder)[0]
    monkeypatch.setattr(start, "PATIENCE", 0.0)
    monkeypatch.undo()

    def slow(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 120.0)

    monkeypatch.setattr(subprocess, "run", slow)
    assert re.search(r"not made: .*120", start.make(run_folder)[0])


def test_the_page_needs_no_torch(run_folder: Path) -> None:  # noqa: F811
    """A report beside a process that just trained must not take its memory a second time."""
    code = (
        "import sys; from pathlib import Path; from skimp.report.make import make; make(Path(sys.argv[1])); "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'pandas'}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run_folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_story_takes_the_highest_of_all_its_processes(run_folder: Path) -> None:  # noqa: F811
    summary = json.loads((run_folder / "summary.json").read_text())
    (run_folder / "summary.json").write_text(json.dumps({**summary, "rss_peak_bytes": 5}))
    assert gather(run_folder).resident_peak == 1_400_000_006  # a resumed process's summary knows only its own
