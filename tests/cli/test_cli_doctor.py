"""`skimp doctor` from outside: its screen, its JSON, its exit codes; and real deaths of real processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skimp.run.doctor import software

Skimp = Callable[..., Any]
SKIMP = [sys.executable, "-m", "skimp.cli.main"]
SOUND = {"torch": "2+cpu", "capability": "AVX2", "threads": 1, "native": "", "cpu": {}, "cards": []}


@pytest.mark.parametrize("columns", [80, 120])
def test_the_screen_of_a_machine(skimp: Skimp, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(software, "probe", lambda: SOUND)
    done = skimp("doctor", columns=columns)
    assert done.code == 0, done.out
    for word in ("machine", "software", "kernels", "extras", "files", "memory", "torch", "all a run needs is here"):
        assert word in done.out, word
    assert max(len(line) for line in done.out.splitlines()) <= columns
    assert "…" not in done.out


def test_what_is_broken_is_exit_code_2_with_the_command_that_mends_it(
    skimp: Skimp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "probe", lambda: {"broken": {"tokenizers": "ImportError: no"}})
    done = skimp("doctor", "--json")
    told = json.loads(done.out)
    assert (done.code, told["well"]) == (2, False)
    wrong = [f for f in told["findings"] if f["state"] == "wrong"]
    assert [(f["group"], f["name"]) for f in wrong] == [("software", "tokenizers")]
    assert "pip install --force-reinstall 'tokenizers" in wrong[0]["mend"]
    assert "1 broken" in skimp("doctor").out


def test_a_failed_self_check_is_named(skimp: Skimp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "probe", lambda: SOUND)
    told = {"checks": [{"name": "8-bit codec", "passed": False, "said": "they differ"}]}
    monkeypatch.setattr(software, "child", lambda *_: told)
    done = skimp("doctor", "--check", columns=120)
    assert done.code == 2
    assert "✗  8-bit codec" in done.out
    monkeypatch.setattr(software, "child", lambda *_: {"crash": "signal 4"})
    assert "ended by signal 4" in skimp("doctor", "--check", columns=120).out


def test_no_run_there(skimp: Skimp, tmp_path: Path) -> None:
    done = skimp("doctor", str(tmp_path / "none"))
    assert (done.code, done.out) == (2, "")
    assert "no such folder" in done.err


def test_a_checkpoint_whose_bytes_changed_is_found_by_reading_it(
    skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any], plan_once: None
) -> None:
    assert skimp("train", write_recipe({"train.steps": 2, "report": False}), "--quiet").code == 0
    done = skimp("doctor", recipe["output"], "--check", columns=200)
    assert done.code == 0
    assert "every byte as it was written" in done.out
    saved = Path(recipe["output"]) / "checkpoints/step-00000002/model.safetensors"
    with saved.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        byte = file.read(1)
        file.seek(-64, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    assert skimp("doctor", recipe["output"]).code == 0  # sizes agree: only reading tells
    done = skimp("doctor", recipe["output"], "--check", columns=200)
    assert done.code == 2
    assert "DAMAGED" in done.out
    assert json.loads(skimp("doctor", recipe["output"], "--check", "--json").out)["checkpoint_sound"] is False


# ---------------------------------------------------------------------- real deaths
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}


def start(*words: str, **options: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [*SKIMP, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), **options
    )


def until(process: subprocess.Popen, words: str) -> None:
    for line in process.stdout:
        if line.startswith(words):
            return
    pytest.fail(f"'{words}' was never said; {process.stderr.read()}")


def doctor(folder: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*SKIMP, "doctor", folder, "--json"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_the_doctor_answers_for_this_machine() -> None:
    done = subprocess.run(
        [*SKIMP, "doctor", "--check", "--json"], capture_output=True, text=True, env=environment(), check=False
    )
    told = json.loads(done.stdout)
    assert done.returncode == 0, told
    assert len([f for f in told["findings"] if f["group"] == "check"]) == 8


@pytest.mark.slow
def test_killed_then_continued_by_the_command_the_doctor_gives(
    write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    process = start("train", write_recipe({"train.steps": 2000, "checkpoint.every": 4}))
    until(process, "step 6/")
    code, alive = doctor(recipe["output"])
    assert (code, alive["verdict"], alive["command"]) == (0, "running", "")
    process.kill()
    process.communicate()
    code, told = doctor(recipe["output"])
    assert (code, told["verdict"], told["sure"]) == (2, "killed", False)
    assert told["lost_steps"] == told["step"] - told["checkpoint_step"]
    assert told["memory"]["planned"] >= told["memory"]["rss"] > 100_000_000
    again = start(*told["command"].split()[1:])
    until(again, "resumed from")
    until(again, "step ")
    again.terminate()
    out, _ = again.communicate(timeout=60)
    code, told = doctor(recipe["output"])
    assert (code, told["verdict"]) == (0, "stopped"), out


STARVED = """
import os, sys
import skimp.run.vitals as vitals
from skimp.core.memory.process import resident
from skimp.recipe.host import HostBudget
from skimp.run.voice import Voice
import skimp

class Starved(Voice):
    def step(self, progress):
        if progress.step == 3:
            self.eaten = bytearray(600_000_000)  # what the plan knows nothing of
            # The machine, as a control group shows it: 10 MB beyond what is held.
            vitals.host_budget = lambda: HostBudget(resident().now + 10_000_000, "control group limit")
            vitals.PULSE_SECONDS = 0.01
        if progress.step == 20:
            os.kill(os.getpid(), 9)

skimp.train(sys.argv[1], voice=Starved())
"""


@pytest.mark.slow
def test_a_kill_at_the_limit_is_told_from_a_kill_with_room(
    write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    file = write_recipe({"train.steps": 2000, "checkpoint.every": 4})
    done = subprocess.run([sys.executable, "-c", STARVED, file], env=environment(), check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    code, told = doctor(recipe["output"])
    assert (code, told["verdict"]) == (2, "killed for memory")
    memory = told["memory"]
    assert memory["peak"] > memory["planned"] + 300_000_000
    assert memory["left"] <= 10_000_000
    assert told["checkpoint_step"] == 20 - 20 % 4 or told["checkpoint_step"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "limit", "kind"),
    [({"train.lr": 1e20, "train.clip": None}, None, "not finite"), ({"checkpoint.every": 2}, 100_000, "disk")],
)
def test_a_bad_number_and_a_disk_that_takes_no_more(
    changes: dict[str, Any], limit: int | None, kind: str, write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    """The disk refuses through the system's own limit on the size of a file: only a checkpoint is larger."""
    file = write_recipe({"train.steps": 20, **changes})
    refuse = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    process = start("train", file, preexec_fn=refuse)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    code, told = doctor(recipe["output"])
    assert (code, told["verdict"], told["sure"]) == (2, kind, True)
    assert told["changes"]
    assert told["command"].startswith("skimp train ")
