"""Loggers: what they are told and when, over failures, deaths and resumes; what is refused before anything loads."""

from __future__ import annotations

import json
import os
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, lines, merged

import skimp.api
from skimp.core.errors import RecipeError
from skimp.recipe import load_recipe
from skimp.run.loggers import start
from skimp.run.loggers.follow import Follower, read_state
from skimp.run.loggers.tail import Tail
from skimp.run.loggers.values import of_evaluation, of_step


def row(step: int, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 1e-3, "memory_bytes": 2 * 10**9, "memory_peak_bytes": 3 * 10**9}


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(r) + "\n" for r in rows))


class Noted:
    """A logger that keeps what it is told, and fails at a step."""

    def __init__(self, can_rewind: bool = False, fails_at: int | None = None) -> None:
        self.can_rewind, self.fails_at = can_rewind, fails_at
        self.words, self.run = "here", "run-1"
        self.told: list[tuple[int, dict[str, float]]] = []
        self.ended = ""

    def write(self, step: int, values: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route\nto anywhere")
        self.told.append((step, values))

    def flush(self) -> None:
        assert self.told

    def rewind(self, step: int) -> None:
        self.told = [(s, v) for s, v in self.told if s <= step]

    def close(self, summary: dict[str, Any]) -> None:
        self.ended = f"closed {summary.get('stopped')}"

    def discard(self) -> None:
        self.ended = "discarded"

    def steps(self) -> list[int]:
        return [s for s, v in self.told if "train/loss" in v]


# ------------------------------------------------------------------------------------- reading a growing file
def test_a_tail_reads_each_line_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == ([], False)
    append(path, row(1), row(2))
    assert [r["step"] for r in tail.read()[0]] == [1, 2]
    with path.open("a") as file:
        file.write('{"step"')
    assert tail.read() == ([], False)
    with path.open("a") as file:
        file.write(": 3}\n")
    assert tail.read() == ([{"step": 3}], False)
    assert tail.read() == ([], False)


@pytest.mark.parametrize("again", [0, 1, 3])
def test_a_tail_notices_that_its_file_was_cut_back(tmp_path: Path, again: int) -> None:
    """Also when the file has grown past the old place again, to lines of the same length."""
    path = tmp_path / "m.jsonl"
    append(path, *(row(s) for s in range(1, 5)))
    tail = Tail(path)
    tail.read()
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    path.write_bytes(b"".join(kept))
    append(path, *(row(s, loss=2.5) for s in range(3, 3 + again)))
    rows, over = tail.read()
    assert over
    assert [r["step"] for r in rows] == list(range(1, 3 + again))


# ------------------------------------------------------------------------------------------------- what is told
def test_values_have_names_and_units() -> None:
    told = of_step(row(1) | {"tokens_per_second": 7, "clip_scale": 1.0}, {"planned": 4 * 10**9, "budget": None})
    assert told == {
        "train/loss": 1.0, "train/lr": 1e-3, "train/tokens_per_second": 7.0,
        "memory_gb/now": 2.0, "memory_gb/peak": 3.0, "memory_gb/planned": 4.0,
    }  # fmt: skip
    assert of_step({"loss": float("nan"), "grad_norm": True}, {}) == {}
    assert of_evaluation({"eval_loss": 2, "eval_losses": {"validation": 2}}) == {"eval/loss": 2.0}
    several = {"eval_loss": 2, "eval_losses": {"code": 1.5, "prose": 2}}
    assert of_evaluation(several) == {"eval/loss": 2.0, "eval/code": 1.5, "eval/prose": 2.0}


def follower(folder: Path, *writers: Noted) -> tuple[Follower, list[str]]:
    lost: list[str] = []
    named = {f"logger{n}": w for n, w in enumerate(writers)}
    return Follower(folder, named, {"planned": 1}, lambda name, why: lost.append(f"{name}: {why}")), lost


def test_every_row_once_and_the_summary_at_the_end(tmp_path: Path) -> None:
    logger = Noted()
    mine, lost = follower(tmp_path, logger)
    append(tmp_path / "evals.jsonl", {"step": 0, "eval_loss": 5.0})
    mine.begin()
    mine.poll()
    assert logger.told == []  # nothing before the first step
    append(tmp_path / "metrics.jsonl", row(1), row(2))
    mine.poll()
    append(tmp_path / "evals.jsonl", {"step": 2, "eval_loss": 4.0})
    mine.poll()
    append(tmp_path / "metrics.jsonl", row(3))
    (tmp_path / "summary.json").write_text('{"stopped": "finished"}')
    mine.close()
    assert [s for s, _ in logger.told] == [0, 1, 2, 2, 3]
    assert logger.told[0][1] == {"eval/loss": 5.0}
    assert (logger.ended, lost) == ("closed finished", [])
    assert read_state(tmp_path) == {"logger0": {"step": 3, "eval": 2, "run": "run-1"}}


def test_one_that_fails_is_said_once_and_catches_up_in_the_next_process(tmp_path: Path) -> None:
    bad, good = Noted(fails_at=2), Noted()
    mine, lost = follower(tmp_path, bad, good)
    append(tmp_path / "metrics.jsonl", row(1), row(2))
    mine.poll()
    append(tmp_path / "metrics.jsonl", row(3))
    mine.close()
    assert lost == ["logger0: ConnectionError: no route"]
    assert good.steps() == [1, 2, 3]
    assert bad.steps() == [1]
    healed = Noted()
    again, lost = follower(tmp_path, healed, Noted())
    again.begin()
    append(tmp_path / "metrics.jsonl", row(4))
    again.close()
    assert (healed.steps(), lost) == ([2, 3, 4], [])


@pytest.mark.parametrize("can_rewind", [True, False])
def test_steps_that_are_done_again(tmp_path: Path, can_rewind: bool) -> None:
    """A death after step 4, a checkpoint at step 2: a logger that can takes the new ones, another keeps the old."""
    append(tmp_path / "metrics.jsonl", *(row(s) for s in (1, 2, 3, 4)))
    logger = Noted(can_rewind)
    mine, _ = follower(tmp_path, logger)
    mine.poll()
    whole = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(whole[:2]))
    again, _ = follower(tmp_path, logger)
    again.begin()
    append(tmp_path / "metrics.jsonl", *(row(s, loss=9.0) for s in (3, 4, 5)))
    again.close()
    assert logger.steps() == [1, 2, 3, 4, 5]
    losses = [v["train/loss"] for _, v in logger.told]
    assert losses == ([1, 1, 9, 9, 9] if can_rewind else [1, 1, 1, 1, 9])
    # The same within one process, after a reload of a checkpoint.
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(whole[:1]))
    append(tmp_path / "metrics.jsonl", *(row(s, loss=7.0) for s in (2, 3, 4, 5, 6)))
    third, _ = follower(tmp_path, logger)
    third.poll()
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(whole[:1]))
    append(tmp_path / "metrics.jsonl", *(row(s, loss=6.0) for s in (2, 3, 4, 5, 6, 7)))
    third.close()
    assert logger.steps()[-1] == 7
    assert [v["train/loss"] for _, v in logger.told][-1] == 6.0


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    logger = Noted()
    append(tmp_path / "evals.jsonl", {"step": 0, "eval_loss": 5.0})
    mine, _ = follower(tmp_path, logger)
    mine.poll()
    mine.close()
    assert (logger.ended, logger.told) == ("discarded", [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evals.jsonl"]


# ------------------------------------------------------------------------------------------------ refused early
@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        (["tensorboard", "mlflow"], "known: tensorboard, trackio, wandb"),
        ({"wand": {}}, "did you mean 'wandb'?"),
        ({"wandb": {"moed": "offline"}}, "did you mean 'mode'?"),
        ({"tensorboard": None}, "tensorboard: {} switches it on"),
        (7, "write log: [tensorboard]"),
    ],
)
def test_an_unknown_logger_is_refused_with_near_names(recipe: dict[str, Any], log: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({**recipe, "log": log})
    assert message in str(caught.value)


def test_switches_and_options(recipe: dict[str, Any]) -> None:
    on = load_recipe({**recipe, "log": ["tensorboard", {"wandb": {"mode": "offline"}}]}, ["log.wandb.project=mine"])
    assert set(on.log.wanted) == {"tensorboard", "wandb"}
    assert (on.log.wandb.mode, on.log.wandb.project) == ("offline", "mine")
    assert load_recipe(on.as_dict()) == on
    assert load_recipe(on.as_dict(), ["log.wandb=false", "log.tensorboard=false"]).log.wanted == {}
    assert load_recipe(recipe, ["log=tensorboard"]).log.wanted == {"tensorboard": {"dir": None}}


def test_a_missing_package_is_told_before_anything_loads(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError) as caught:
        skimp.api.train({**recipe, "model": "/nonexistent", "log": "wandb"})
    assert "pip install 'skimp[wandb]'" in str(caught.value)
    assert not Path(recipe["output"]).exists()


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nosuchlogger").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError):
        start.check_installed({"nosuchlogger": {}})


# --------------------------------------------------------------------------------------------- whole sessions
def have(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None


needs_tensorboard = pytest.mark.skipif(not have("tensorboard"), reason="pip install 'skimp[tensorboard]'")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Event files as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


@needs_tensorboard
@pytest.mark.usefixtures("plan_once")
def test_a_session_and_its_resume_in_tensorboard(recipe: dict[str, Any]) -> None:
    recipe = merged(recipe, {"log": "tensorboard", "checkpoint.every": 2, "eval.every": 2})
    voice = Heard(stop_at=3)
    first = skimp.api.train(recipe, voice=voice)
    assert any(sentence.startswith("tensorboard: tensorboard --logdir ") for sentence in voice.said)
    outcome = skimp.api.train(recipe, resume=True)
    told = scalars(outcome.folder / "tensorboard")
    rows = lines(outcome.folder / "metrics.jsonl")
    assert first.summary["steps"] == 3
    for tag, key in (("train/loss", "loss"), ("train/lr", "lr"), ("train/grad_norm", "grad_norm")):
        assert told[tag] == [(r["step"], pytest.approx(r[key], rel=1e-6)) for r in rows], tag
    assert [s for s, _ in told["eval/loss"]] == [0, 2, 4, 6]
    plan = json.loads((outcome.folder / "plan.json").read_text())
    assert told["memory_gb/planned"][-1][1] == pytest.approx(plan["peak_bytes"] / 1e9, rel=1e-6)
    assert {"memory_gb/now", "memory_gb/peak", "memory_gb/budget"} <= told.keys()
    assert read_state(outcome.folder)["tensorboard"]["step"] == 6


@needs_tensorboard
def test_steps_that_are_done_again_replace_the_old_ones_in_tensorboard(tmp_path: Path) -> None:
    from skimp.run.loggers.writers import TensorBoardWriter

    for lost, steps in ((False, (1, 2, 3, 4)), (True, (3, 4, 5))):
        writer = TensorBoardWriter(tmp_path, "run", None, {"dir": None}, {})
        if lost:
            writer.rewind(2)
        for step in steps:
            writer.write(step, {"train/loss": 9.0 if lost else 1.0})
        writer.close({})
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 1.0), (3, 9.0), (4, 9.0), (5, 9.0)]
    empty = TensorBoardWriter(tmp_path / "other", "run", None, {"dir": None}, {})
    empty.discard()
    assert not (tmp_path / "other" / "tensorboard").exists()


@needs_tensorboard
def test_a_logger_that_cannot_open_stops_the_run_before_the_weights(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    wanted = {"tensorboard": {"dir": str(tmp_path / "a file" / "below")}}
    made = load_recipe({**recipe, "log": wanted})
    with pytest.raises(RecipeError) as caught, start.following(made, tmp_path, Heard()):
        pytest.fail("it was opened")
    assert "NotADirectoryError" in str(caught.value)
    assert "log.tensorboard=false" in str(caught.value)


def test_a_child_that_dies_is_said_once_and_training_goes_on(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that opens and then takes its process down."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'skimp.run.loggers' in ' '.join(sys.orig_argv):\n"
        "    import os, skimp.run.loggers.writers as w\n"
        "    class Bad:\n"
        "        words = 'here'; run = 'r'; can_rewind = False\n"
        "        def __init__(self, *a): pass\n"
        "        def write(self, step, values): print('out of luck', file=sys.stderr, flush=True); os._exit(9)\n"
        "        def flush(self): raise AssertionError\n"
        "    w.WRITERS['tensorboard'] = Bad\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = load_recipe({**recipe, "log": "tensorboard"})
    folder = tmp_path / "run"
    folder.mkdir()
    append(folder / "metrics.jsonl", row(1))
    voice = Heard()
    with start.following(made, folder, voice) as loggers:
        assert loggers is not None
        loggers.begin(None, None)
        while len(voice.said) < 2:
            loggers.listen(5.0)
        for _ in range(3):
            loggers.listen()
    assert voice.said[0] == "tensorboard: here"
    assert voice.said[1:] == ["the loggers' process ended: out of luck; training goes on and metrics.jsonl is complete"]


@pytest.mark.slow
@pytest.mark.skipif(not have("trackio"), reason="pip install 'skimp[trackio]'")
@pytest.mark.usefixtures("plan_once")
def test_a_session_and_its_resume_in_trackio(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = merged(recipe, {"log": {"trackio": {"project": "tests"}}, "checkpoint.every": 2})
    skimp.api.train(recipe, voice=Heard(stop_at=3))
    outcome = skimp.api.train(recipe, resume=True)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        found = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    run = read_state(outcome.folder)["trackio"]["run"]
    told = {step: json.loads(values) for name, step, values in found if name == run and b"train/loss" in bytes(values)}
    assert {name for name, _, _ in found} == {run}
    rows = lines(outcome.folder / "metrics.jsonl")
    assert {s: v["train/loss"] for s, v in told.items()} == {r["step"]: r["loss"] for r in rows}


@pytest.mark.slow
@pytest.mark.skipif(not have("wandb"), reason="pip install 'skimp[wandb]'")
@pytest.mark.usefixtures("plan_once")
def test_a_session_in_wandb_offline(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    recipe = merged(recipe, {"log": {"wandb": {"mode": "offline"}}})
    voice = Heard()
    outcome = skimp.api.train(recipe, voice=voice)
    run = read_state(outcome.folder)["wandb"]["run"]
    files = list((outcome.folder / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) == 1
    assert any("wandb sync" in sentence for sentence in voice.said)
    assert b"train/loss" in files[0].read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not have("wandb"), reason="pip install 'skimp[wandb]'")
def test_wandb_without_a_login_is_refused_before_the_weights(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    made = load_recipe({**recipe, "log": "wandb"})
    with pytest.raises(RecipeError) as caught, start.following(made, tmp_path, Heard()):
        pytest.fail("it was opened")
    assert "wandb login" in str(caught.value)
    assert "log.wandb.mode=offline" in str(caught.value)
    assert not (tmp_path / "wandb").exists()
