"""Signs of life: what they say, that they never fail a run, and that they fit one page whatever is said."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard

import skimp
from skimp.core.errors import ModelError, NonFiniteError
from skimp.run.vitals import CRASH, PAGE, VITALS, Vitals, oom_kills, process_birth, process_state, read


def test_a_beat_says_phase_step_and_memory(tmp_path: Path) -> None:
    vitals = Vitals(tmp_path)
    with vitals.session():
        vitals.beat("load", budget=7)
        vitals.beat("train", 3, planned=5)
        now = read(tmp_path)
        assert now is not None
        assert {key: now[key] for key in ("phase", "step", "budget", "planned", "pid")} == {
            "phase": "train", "step": 3, "budget": 7, "planned": 5, "pid": os.getpid(),
        }  # fmt: skip
        assert now["peak"] >= now["rss"] > 0
        assert now["left"] > 0
        vitals.beat("save")
        assert read(tmp_path)["step"] == 3
        vitals.ended("finished")
    assert read(tmp_path)["ended"]["how"] == "finished"
    assert (tmp_path / VITALS).stat().st_size == PAGE


def test_the_exception_is_kept_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError), Vitals(tmp_path).session():
        raise NonFiniteError("a finite loss in step 4", "nan", "it spreads", ["lower train.lr"])
    ended = read(tmp_path)["ended"]
    assert (ended["how"], ended["kind"], ended["asked"]) == ("error", "NonFiniteError", "a finite loss in step 4")
    assert ended["instead"] == ["lower train.lr"]
    with pytest.raises(RuntimeError), Vitals(tmp_path).session():
        raise RuntimeError("a bug") from OSError(errno.ENOSPC, "full")
    ended = read(tmp_path)["ended"]
    assert (ended["kind"], ended["errno"]) == ("RuntimeError", errno.ENOSPC)
    assert "test_vitals.py" in ended["where"][-1]


@pytest.mark.parametrize("length", [100, 5_000, 1_000_000])
def test_any_message_fits_the_page(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError), Vitals(tmp_path).session():
        raise ValueError("é" * length)
    assert (tmp_path / VITALS).stat().st_size == PAGE
    assert read(tmp_path)["ended"]["message"].startswith("éééé")


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals(tmp_path)
    with vitals.session():
        vitals.beat("train", 1)

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            vitals.beat("train", 2)
        assert read(tmp_path)["step"] == 1
    other = Vitals(tmp_path / "absent")
    with other.session():
        other.beat("train", 1)
    assert read(tmp_path / "absent") is None


def test_half_a_write_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / VITALS).write_bytes(b'{"phase": "tr')
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / VITALS).write_bytes(b'{"phase": "train"}   \n'))
    assert read(tmp_path) == {"phase": "train"}
    (tmp_path / VITALS).write_bytes(b"")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert read(tmp_path) is None


def test_a_process_is_known_by_number_and_birth() -> None:
    assert process_birth(os.getpid()) == process_birth(os.getpid()) > 0
    assert process_state(os.getpid()) == "R"
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "Z"
    child.wait()
    assert (process_birth(child.pid), process_state(child.pid)) == (None, "")


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    assert oom_kills(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("pgfault 9\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3


CRASHING = """
import faulthandler, sys
from pathlib import Path
from skimp.run.vitals import Vitals
with Vitals(Path(sys.argv[1])).session() as vitals:
    vitals.beat("train", 2)
    faulthandler._sigsegv()
"""


def test_a_segmentation_fault_leaves_its_stack(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHING, str(tmp_path)], capture_output=True, check=False, timeout=60)
    assert done.returncode == -11
    assert "Segmentation fault" in (tmp_path / CRASH).read_text()
    assert (read(tmp_path)["step"], "ended" in read(tmp_path)) == (2, False)


@pytest.mark.usefixtures("plan_once")
def test_a_whole_run_says_its_phases(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | None]] = []
    plain = Vitals.beat

    def beat(self: Vitals, phase: str, step: int | None = None, **facts: Any) -> None:
        plain(self, phase, step, **facts)
        seen.append((phase, self.record["step"]))

    monkeypatch.setattr(Vitals, "beat", beat)
    outcome = skimp.train(recipe, "checkpoint.every=4")
    assert [s for s in seen if s[0] != "evaluate"] == [
        ("plan", None), ("load", None), *[("train", n) for n in range(4)], ("save", 4), ("train", 4), ("train", 5),
        ("save", 6),
    ]  # fmt: skip
    kept = read(outcome.folder)
    assert (kept["ended"]["how"], kept["step"], kept["steps"]) == ("finished", 6, 6)
    assert kept["planned"] == outcome.summary["planned_rss_bytes"]
    assert not (outcome.folder / CRASH).exists()


@pytest.mark.usefixtures("plan_once")
def test_an_end_before_the_first_step_leaves_nothing(recipe: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        skimp.train(recipe | {"sample": {"prompt": "the cat", "tokens": 1000}})
    assert not Path(recipe["output"]).exists()


@pytest.mark.usefixtures("plan_once")
def test_a_signal_is_an_end_with_words(recipe: dict[str, Any]) -> None:
    outcome = skimp.train(recipe, voice=Heard(stop_at=2))
    assert json.loads((outcome.folder / VITALS).read_text())["ended"]["how"] == "SIGTERM"
