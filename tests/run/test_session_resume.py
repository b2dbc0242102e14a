"""A run that is stopped and resumed twice ends bit for bit where the unbroken one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, _own_cache, fingerprints, lines, make_texts, merged, write_texts  # noqa: F401

import skimp.api

pytestmark = pytest.mark.usefixtures("plan_once")

CASES: dict[str, dict[str, Any]] = {
    "adamw": {"train.weight_decay": 0.1},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "bf16": {"precision": "bf16"},
    "bf16-8bit": {"precision": "bf16", "optimizer": "adamw8bit"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "in-backward": {"exact.in_backward": True, "exact.micro_batch": 4},
    "in-backward-unclipped": {"exact.in_backward": True, "exact.micro_batch": 4, "train.clip": None},
    "streaming": {"data.streaming": True, "data.validation": None, "eval": None},
    "offloaded": {
        "exact.offload": {"activations": "disk", "blocks": 2, "optimizer": "disk"},
        "exact.in_backward": True,
        "exact.micro_batch": 4,
    },
    "unpacked": {"data.packing": False, "data.too_long": "truncate"},
    "wsd": {"train.schedule": "wsd", "data.too_long": "truncate", "data.validation_tokens": 200},
}
#: One of each mechanism in every test run; the others are variations of them.
ALWAYS = ("adamw8bit", "bf16-mixed", "in-backward", "offloaded", "streaming")


def stopped_twice(recipe: dict[str, Any], at: tuple[int, int]) -> Any:
    first = skimp.api.train(recipe, voice=Heard(stop_at=at[0]))
    assert (first.stopped, first.summary["steps"]) == ("SIGTERM", at[0])
    second = skimp.api.train(recipe, resume=True, voice=Heard(stop_at=at[1]))
    assert (second.stopped, second.summary["steps"]) == ("SIGTERM", at[1])
    return skimp.api.train(recipe, resume=True)


def assert_equal(a: Path, b: Path, steps: int) -> None:
    numbers = ("step", "loss", "grad_norm", "lr", "tokens", "clip_scale")
    rows = [[tuple(row[k] for k in numbers) for row in lines(path / "metrics.jsonl")] for path in (a, b)]
    assert rows[0] == rows[1]
    assert [row[0] for row in rows[0]] == list(range(1, steps + 1))
    assert fingerprints(a, steps) == fingerprints(b, steps)
    assert len(fingerprints(a, steps)) == 2


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_resumed_twice_is_the_unbroken_run(case: str, recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = merged(recipe, CASES[case])
    whole = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")}))
    parts = stopped_twice(recipe, (2, 4))
    assert whole.stopped == parts.stopped == "finished"
    assert_equal(whole.folder, parts.folder, 6)
    for key in ("loss_first", "loss_last", "eval_loss_before", "eval_loss_after", "steps"):
        assert whole.summary[key] == parts.summary[key], key
    assert whole.summary["loss_last"] < whole.summary["loss_first"] - 0.3  # it learned, so equality says something


def test_a_run_moves_to_disk_and_back_between_its_parts(recipe: dict[str, Any], tmp_path: Path) -> None:
    """What was saved from one place is read into another, and the run is the one that never moved."""
    whole = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")}))
    away = merged(recipe, {"exact.offload": {"activations": "disk", "blocks": 1, "optimizer": "disk"}})
    first = skimp.api.train(away, voice=Heard(stop_at=2))
    assert first.summary["steps"] == 2
    second = skimp.api.train(recipe, resume=True, voice=Heard(stop_at=4))
    assert second.summary["steps"] == 4
    parts = skimp.api.train(away, resume=True)
    assert_equal(whole.folder, parts.folder, 6)
    assert list((parts.folder / "offload").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward:7", "backward:5", "update:4", "mid_tensor:80"])
def test_an_offloaded_run_killed_anywhere_goes_on_to_the_same_bits(
    fault: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """The states' file dies with the process; the checkpoint is what is resumed from."""
    away = {"exact.offload": {"activations": "disk", "blocks": 2, "optimizer": "disk"}, "checkpoint.every": 2}
    recipe = merged(recipe, away)
    whole = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")}))
    program = "import json, sys, skimp.api; skimp.api.train(json.loads(sys.argv[1]))"
    killed = subprocess.run(
        [sys.executable, "-c", program, json.dumps(recipe)],
        env={**os.environ, "SKIMP_FAULT": fault},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "run"
    assert list((folder / "offload").iterdir()) == []
    parts = skimp.api.train(recipe, resume=True)
    assert_equal(whole.folder, parts.folder, 6)


def test_epochs_later_than_the_first_keep_their_order(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Stopped inside epochs 2 and 3: the order is that of those epochs, not of the first one again."""
    small = write_texts(tmp_path / "small.jsonl", make_texts(9))
    changes = {"data.train": str(small), "data.validation": None, "eval": None, "train.steps": None}
    recipe = merged(recipe, {**changes, "train.epochs": 3, "train.batch_tokens": 64, "exact.micro_batch": 1})
    voice = Heard()
    whole = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")}), voice=voice)
    steps = whole.summary["steps"]
    assert any(f"3 epochs are {steps} optimizer steps" in line for line in voice.said)
    per_epoch = steps // 3
    assert per_epoch >= 3
    parts = stopped_twice(recipe, (per_epoch + 1, 2 * per_epoch + 1))
    assert_equal(whole.folder, parts.folder, steps)


def test_a_longer_run_goes_on_and_a_finished_one_says_so(recipe: dict[str, Any]) -> None:
    done = skimp.api.train(recipe)
    summary = (done.folder / "summary.json").read_bytes()
    voice = Heard()
    again = skimp.api.train(recipe, resume=True, voice=voice)
    assert again.summary == done.summary
    assert (done.folder / "summary.json").read_bytes() == summary
    assert voice.plans == []  # neither planned nor loaded
    assert "nothing to do" in voice.said[-1]
    assert "raise train.steps" in voice.said[-1]
    longer = skimp.api.train(merged(recipe, {"train.steps": 8}), resume=True, voice=voice)
    assert longer.summary["steps"] == 8
    assert any("train.steps: 6 -> 8; the new value is used" in line for line in voice.said)
    assert [row["step"] for row in lines(done.folder / "metrics.jsonl")] == list(range(1, 9))


def test_a_run_that_died_before_its_summary_is_summed_up(recipe: dict[str, Any]) -> None:
    done = skimp.api.train(recipe)
    (done.folder / "summary.json").unlink()
    again = skimp.api.train(recipe, resume=True)
    assert again.stopped == "finished"
    for key in ("steps", "loss_last", "eval_loss_after", "measured_peak_bytes"):
        assert again.summary[key] == done.summary[key], key
    assert done.summary["measured_peak_bytes"] > 0


def test_resume_needs_no_pretrained_weights(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    skimp.api.train(recipe, voice=Heard(stop_at=2))
    monkeypatch.setattr("skimp.run.session.load_weights", lambda *_: pytest.fail("they were loaded"))
    assert skimp.api.train(recipe, resume=True).summary["steps"] == 6
