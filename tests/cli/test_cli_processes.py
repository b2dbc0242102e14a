"""The command in processes of its own: signals from outside, deaths, a terminal, and what gets imported."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_cases import fingerprints, lines

pytestmark = pytest.mark.slow

SKIMP = [sys.executable, "-m", "skimp.cli.main"]
HEAVY = ("datasets", "pyarrow", "sklearn", "peft", "bitsandbytes", "torchao", "pandas")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}


def start(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*SKIMP, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def until(process: subprocess.Popen, words: str) -> None:
    """Read the output up to a line that begins with `words`."""
    for line in process.stdout:
        if line.startswith(words):
            return
    pytest.fail(f"'{words}' was never said; {process.stderr.read()}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_to_the_whole_group_save_and_the_command_goes_on(
    number: signal.Signals,
    code: int,
    write_recipe: Callable[..., str],
    recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Ctrl-C reaches every process of the terminal's group, the tokenising child of a stream included."""
    changes = {"data.streaming": True, "data.validation": None, "eval": None, "train.steps": 60}
    file = write_recipe(changes)
    whole = subprocess.run([*SKIMP, "train", file, f"output={tmp_path / 'whole'}"], env=environment(), check=False)
    assert whole.returncode == 0
    process = start("train", file)
    until(process, "step 2/")
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    command = f"skimp train {recipe['output']} --resume"
    assert command in out
    done = subprocess.run([*SKIMP, *command.split()[1:]], env=environment(), check=False)
    assert done.returncode == 0
    assert fingerprints(Path(recipe["output"]), 60) == fingerprints(tmp_path / "whole", 60)


def test_killed_while_planning_the_same_command_starts_again(
    write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    file = write_recipe()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        process = start("train", file)
        until(process, "train: ")  # the folder is claimed and the text is ready; now it plans
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (-number, 128 + number)
        assert "Traceback" not in err
    assert subprocess.run([*SKIMP, "train", file], env=environment(), check=False).returncode == 0


def test_on_a_terminal_there_is_one_line_of_progress(write_recipe: Callable[..., str]) -> None:
    leader, follower = pty.openpty()
    file = write_recipe({"train.steps": 40, "budget": "4GB"})
    process = subprocess.Popen(
        [*SKIMP, "train", file],
        stdout=follower,
        stderr=follower,
        env={**environment(), "COLUMNS": "80", "TERM": "xterm"},
    )
    os.close(follower)
    seen, end = b"", time.monotonic() + 120
    while time.monotonic() < end and (select.select([leader], [], [], 1)[0] or process.poll() is None):
        try:
            seen += os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
    os.close(leader)
    assert process.wait(60) == 0
    text = seen.decode(errors="replace")
    for part in (
        "step ",
        "/40",
        "loss ",
        "tok/s",
        "left",
        "memory",
        "of 4.00 GB",
        "planned against measured",
    ):
        assert part in text, part
    assert "…" not in text  # at 80 columns it wraps and cuts nothing
    assert "step 7/40  lr" not in text  # no line a step: those are for pipes


SESSION = """
import json, sys
import skimp
skimp.train(sys.argv[1])
print("IMPORTED", json.dumps(sorted(sys.modules)))
"""


def test_the_training_process_imports_nothing_heavy(write_recipe: Callable[..., str]) -> None:
    """Sample, evaluation and tokenising included: each of them runs in a child or without these packages."""
    file = write_recipe({"sample": {"prompt": "the cat", "tokens": 3}, "optimizer": "adamw8bit"})
    done = subprocess.run(
        [sys.executable, "-c", SESSION, file], capture_output=True, text=True, env=environment(), check=True
    )
    imported = json.loads(done.stdout.split("IMPORTED ")[1])
    assert not [name for name in HEAVY if name in imported]
    assert "torch" in imported


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    write_recipe: Callable[..., str], recipe: dict[str, Any]
) -> None:
    file = write_recipe({"train.steps": 60, "checkpoint.every": 2})
    process = start("train", file)
    until(process, "step 5/")
    process.kill()
    process.communicate()
    done = subprocess.run(
        [*SKIMP, "train", file, "--resume"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "resumed from" in done.stdout
    assert [row["step"] for row in lines(Path(recipe["output"]) / "metrics.jsonl")] == list(range(1, 61))
