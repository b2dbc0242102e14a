"""What the commands print: pure JSON where it is asked for, whole words at 80 columns, the way to go on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skimp.core.registry import methods

Skimp = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("plan_once")


def test_the_json_of_a_plan_is_all_there_is(skimp: Skimp, write_recipe: Callable[..., str]) -> None:
    done = skimp("plan", write_recipe(), "--json")
    plan = json.loads(done.out)
    assert (done.code, plan["fits"]) == (0, True)
    assert plan.keys() >= {
        "fits", "peak_bytes", "by_category", "chosen", "alternatives", "places", "predicted_step_seconds",
    }  # fmt: skip
    assert plan["places"].keys() == {"device", "host", "disk"}
    assert sum(plan["by_category"].values()) == plan["peak_bytes"]
    pinned = {"micro_rows": 2, "recompute": [0], "loss_chunk": 64, "in_backward": False}
    assert {key: plan["chosen"][key] for key in pinned} == pinned


def test_methods_as_json_and_for_people(skimp: Skimp) -> None:
    listed = json.loads(skimp("methods", "--json").out)
    assert [m["name"] for m in listed] == list(methods())
    assert all(m.keys() >= {"name", "kind", "paper", "attacks", "exact", "summary"} for m in listed)
    for columns in (80, 120):
        done = skimp("methods", columns=columns)
        shown = done.out.splitlines()
        assert max(len(line) for line in shown) <= columns
        for m in listed:
            assert any(line.startswith(m["name"] + " ") for line in shown), m["name"]
            missing = set(m["summary"].split()) - set(done.out.split())
            assert not missing, f"cut at {columns} columns: {missing}"
    only = json.loads(skimp("methods", "--json", "--attacks", "optimizer", "--approximate").out)
    assert only
    assert all("optimizer" in m["attacks"] and not m["exact"] for m in only)


def test_the_schema_is_json(skimp: Skimp) -> None:
    assert json.loads(skimp("schema").out)["title"] == "Recipe"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_plan_cuts_no_word(skimp: Skimp, write_recipe: Callable[..., str], columns: int) -> None:
    done = skimp("plan", write_recipe(), columns=columns)
    assert done.code == 0
    assert max(len(line) for line in done.out.splitlines()) <= columns
    words = done.out.split()
    for word in (
        "parameters",
        "activations",
        "micro-batch",
        "recompute",
        "predicted:",
        "tokens/s",
        "checkpoints",
    ):
        assert word in words, word
    assert "…" not in done.out


def test_a_training_on_a_pipe(skimp: Skimp, write_recipe: Callable[..., str], recipe: dict[str, Any]) -> None:
    done = skimp("train", write_recipe({"sample": {"prompt": "the [cat]", "tokens": 3}, "budget": "4GB"}))
    assert (done.code, done.err) == (0, "")
    steps = [line for line in done.out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{n}/6" for n in range(1, 7)]
    for part in ("loss ", " tok/s", " left", "memory ", "peak ", " of 4.00 GB", "lr "):
        assert all(part in line for line in steps), part
    for part in (
        "held-out loss", "sample before: the [cat]", "sample after: the [cat]", "planned against measured",
        "tensors at the peak", "whole process at the peak", "seconds a step", "training loss",
        "finished after",
        f"everything is in {recipe['output']}",
    ):  # fmt: skip
        assert part in done.out, part


def test_quiet_is_only_the_end(skimp: Skimp, write_recipe: Callable[..., str]) -> None:
    done = skimp("train", write_recipe(), "--quiet")
    assert (done.code, done.err) == (0, "")
    assert done.out.strip().startswith("planned against measured")
    assert "finished after" in done.out
    assert "step 1" not in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_the_command_that_goes_on(
    number: signal.Signals,
    skimp: Skimp,
    write_recipe: Callable[..., str],
    recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from skimp.cli.screen import Screen

    plain = Screen.step

    def step(self: Screen, progress: Any) -> None:
        plain(self, progress)
        if progress.step == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Screen, "step", step)
        done = skimp("train", write_recipe())
    assert done.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert f"{number.name}: finishing this step, then saving" in done.err
    command = f"skimp train {recipe['output']} --resume"
    assert f"continue with:\n  {command}\n" in done.out
    assert (Path(recipe["output"]) / "summary.json").is_file()
    done = skimp(*command.split()[1:])  # and that very command works
    assert done.code == 0
    assert "at step 2" in done.out
    assert "step 6/6" in done.out


def test_flags_are_short_for_keys(skimp: Skimp, write_recipe: Callable[..., str], tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    assert skimp("train", write_recipe(), "--steps", "1", "--output", other, "--budget", "5GB").code == 0
    stored = json.loads((Path(other) / "recipe.json").read_text())
    assert (stored["train"]["steps"], stored["budget"]["host"]) == (1, 5 * 10**9)
