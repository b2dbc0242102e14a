"""A disk that fills or fails under the activations on it: the run goes on without, to the bit."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, fingerprints, lines, merged

import skimp.api
from skimp.cli.closing import away_words
from skimp.core import disk
from skimp.core.errors import OffloadError, RecipeError
from skimp.run import faults

pytestmark = pytest.mark.usefixtures("plan_once")

AWAY = {"exact.offload": {"activations": "disk", "blocks": 2}, "checkpoint.every": 2}
#: Parameters move while gradients still come.
MOVING = AWAY | {"exact.in_backward": True, "exact.micro_batch": 4, "train.clip": None}
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "clip_scale")


@pytest.fixture(autouse=True)
def _no_fault_left() -> Any:
    yield
    faults.fault_points = None


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row[k] for k in NUMBERS) for row in lines(folder / "metrics.jsonl")]


def failing(name: str, number: int, after: int, patch: pytest.MonkeyPatch, times: int = 10**9) -> list[int]:
    """The system's call `name` refuses with an error from its `after`-th use on, `times` times; counts the uses."""
    real, used = getattr(os, name), list[int]()

    def call(descriptor: int, *rest: Any) -> Any:
        used.append(1)
        if after <= len(used) < after + times:
            raise OSError(number, os.strerror(number))
        return real(descriptor, *rest)

    patch.setattr(disk.os, name, call)
    return used


def full_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """A quota of 100,000 bytes."""
    real = disk.allocate

    def allocate(descriptor: int, size: int, folder: Path) -> None:
        if size > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        real(descriptor, size, folder)

    patch.setattr(disk, "allocate", allocate)


def damaged(patch: pytest.MonkeyPatch) -> None:
    """One bit of what the 60th read brings."""
    real, used = os.preadv, list[int]()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = real(descriptor, buffers, offset)
        used.append(1)
        if len(used) == 60:
            buffers[0][0:1] = bytes([buffers[0].tobytes()[0] ^ 1])
        return got

    patch.setattr(disk.os, "preadv", preadv)


#: (changes, what fails, words it must say).
CASES: dict[str, tuple[dict[str, Any], Callable[[pytest.MonkeyPatch], Any], tuple[str, ...]]] = {
    "full": (AWAY, full_from_the_start, ("step 1:", "No space left on device", "the step is taken again")),
    "quota": (AWAY, lambda p: failing("pwrite", errno.EDQUOT, 90, p), ("quota", "the step is taken again")),
    "write": (AWAY, lambda p: failing("pwrite", errno.EIO, 90, p), ("cannot be relied on", "the step is taken again")),
    "read": (AWAY, lambda p: failing("preadv", errno.EIO, 60, p), ("cannot be relied on", "the step is taken again")),
    "damaged": (AWAY, damaged, ("their checksum differs", "the step is taken again")),
    "moving-read": (
        MOVING,
        lambda p: failing("preadv", errno.EIO, 33, p),
        ("parameters had moved, so the run went back to step-00000002",),
    ),
    "lora": (AWAY | {"adapter": {"r": 4, "dropout": 0.1}}, full_from_the_start, ("the step is taken again",)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_run_goes_on_without_the_disk_to_the_bit(
    case: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, fail, words = CASES[case]
    recipe = merged(recipe, changes)
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")})).folder
    voice = Heard()
    with monkeypatch.context() as patch:
        fail(patch)
        outcome = skimp.api.train(recipe, voice=voice)
    assert outcome.stopped == "finished"
    (note,) = outcome.summary["survived"]
    assert note in voice.said
    assert all(word in note for word in words), note
    assert outcome.summary["plan"]["chosen"]["offload"] == []
    assert numbers(outcome.folder) == numbers(alone)
    assert len(fingerprints(outcome.folder, 6)) == 2
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)


def test_a_limit_of_the_system_itself(recipe: dict[str, Any], tmp_path: Path) -> None:
    """RLIMIT_FSIZE, as `ulimit -f` sets it, from the third step on: the kernel refuses, not a patch."""
    recipe = merged(recipe, AWAY)
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")})).folder
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    passed: list[int] = []

    def at(point: str) -> None:
        if point == "forward":
            passed.append(1)
            if len(passed) == 5:
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))

    class Lifting(Heard):
        def say(self, text: str) -> None:
            super().say(text)
            if "the step is taken again" in text:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    faults.fault_points = at
    try:
        outcome = skimp.api.train(recipe, voice=Lifting())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (note,) = outcome.summary["survived"]
    assert note.startswith("step 3: ")
    assert "File too large" in note
    assert numbers(outcome.folder) == numbers(alone)
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)


def test_it_ends_saved_where_no_plan_does_without(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing else fitted: the same plan is tried once more, then the run stops with everything saved."""
    monkeypatch.setattr("skimp.run.survive.with_less_disk", lambda *_: None)
    recipe = merged(recipe, AWAY | {"checkpoint.every": None})
    with monkeypatch.context() as patch:
        failing("pwrite", errno.ENOSPC, 90, patch)
        with pytest.raises(OffloadError, match="does without that disk") as stopped:
            skimp.api.train(recipe, voice=Heard())
    error = stopped.value
    assert error.exit_code == 2
    assert "No space left on device" in error.found
    assert any(f"skimp train {recipe['output']} --resume" in way for way in error.instead)
    assert "free space there" in error.instead
    assert skimp.api.train(recipe, resume=True).stopped == "finished"
    assert [row["step"] for row in lines(Path(recipe["output"]) / "metrics.jsonl")] == list(range(1, 7))


def test_a_disk_that_was_full_for_a_moment(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing does without, but the second attempt finds room: the run keeps its plan."""
    monkeypatch.setattr("skimp.run.survive.with_less_disk", lambda *_: None)
    recipe = merged(recipe, AWAY)
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")})).folder
    with monkeypatch.context() as patch:
        failing("pwrite", errno.ENOSPC, 90, patch, times=1)
        outcome = skimp.api.train(recipe)
    assert outcome.summary["plan"]["chosen"]["offload"] == [0, 1]
    assert len(outcome.summary["survived"]) == 1
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)


@pytest.mark.parametrize("what", ["activations", "optimizer"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_loads(
    what: str, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    places = {"activations": "none", "optimizer": "none"} | {what: "disk"}
    away = places | {"folder": str(tmp_path / "file" / "x")} | ({"blocks": 2} if what == "activations" else {})
    monkeypatch.setattr("skimp.run.session.load_weights", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(RecipeError, match="Not a directory") as refused:
        skimp.api.train(merged(recipe, {"exact.offload": away}))
    assert "exact.offload.folder=… that can be written" in refused.value.instead
    assert not Path(recipe["output"]).exists()


def test_what_moved_is_counted_by_step_summed_up_and_goes_on_over_a_resume(recipe: dict[str, Any]) -> None:
    recipe = merged(recipe, AWAY)
    skimp.api.train(recipe, voice=Heard(stop_at=3))
    outcome = skimp.api.train(recipe, resume=True)
    rows, total = lines(outcome.folder / "metrics.jsonl"), outcome.summary["away"]
    assert [row["step"] for row in rows if "away" in row] == list(range(1, 7))
    # What a forward keeps and a backward reads does not depend on the step: but for what is handed back before it left.
    assert len({row["away"]["out"] for row in rows}) == 1
    assert rows[0]["away"]["out"] > 0
    for key in ("out", "back"):
        assert total[key] == sum(row["away"][key] for row in rows)
    assert total["moving"] == pytest.approx(sum(row["away"]["moving"] for row in rows))
    assert 0.0 <= total["hidden"] <= 1.0
    said = away_words(total)
    assert said.startswith("activations that waited on disk: ")
    assert f"{total['hidden']:.0%} hidden" in said


def test_a_run_without_has_nothing_to_say(recipe: dict[str, Any]) -> None:
    outcome = skimp.api.train(recipe)
    assert outcome.summary["away"] is None
    assert all("away" not in row for row in lines(outcome.folder / "metrics.jsonl"))
    assert away_words({"out": 1e9, "back": 1e9, "moving": 0.0, "waited": 0.0, "hidden": None}).endswith("1.00 GB back")
