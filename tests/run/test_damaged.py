"""Checkpoints that were damaged after they were complete: named aloud, set aside, and the one before is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, fingerprints, lines, merged

import skimp.api
from skimp.core.errors import CheckpointError, DamagedCheckpoint
from skimp.run import checkpoint_read
from skimp.run.checkpoint_folder import latest

pytestmark = pytest.mark.usefixtures("plan_once")


def flip(path: Path, at: int = -5) -> None:
    """One bit of one byte, as a disk does."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


#: What happens to the newest checkpoint, and what is said of it.
HARM: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "a bit of a weight": (lambda c: flip(c / "model.safetensors"), "crc32", True),
    "a bit of an optimizer state": (lambda c: flip(c / "optimizer.safetensors"), "crc32", True),
    "a bit of a header": (lambda c: flip(c / "model.safetensors", 40), "header", True),
    "a bit of the state": (lambda c: flip(c / "state.json"), "state.json changed on disk", True),
    "half of a file": (lambda c: cut(c / "optimizer.safetensors"), "bytes where", False),
    "no mark": (lambda c: (c / "COMPLETE").unlink(), "the save did not finish", False),
    "half of a mark": (lambda c: cut(c / "COMPLETE"), "cannot be read", False),
    "a file gone": (lambda c: (c / "model.safetensors").unlink(), "model.safetensors is missing", False),
}


@pytest.mark.parametrize("harm", HARM)
def test_the_resume_goes_on_from_the_one_before_and_ends_with_the_same_bits(
    harm: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    do, said, aside = HARM[harm]
    recipe = merged(recipe, {"checkpoint.every": 2, "checkpoint.keep": 3})
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "alone")})).folder
    skimp.api.train(recipe, voice=Heard(stop_at=4))
    checkpoints = Path(recipe["output"]) / "checkpoints"
    do(checkpoints / "step-00000004")
    voice = Heard()
    outcome = skimp.api.train(recipe, resume=True, voice=voice)
    (sentence,) = [line for line in voice.said if line.startswith("passed over")]
    assert "step-00000004" in sentence
    assert said in sentence
    assert any("step-00000002 at step 2" in line for line in voice.said if line.startswith("resumed from"))
    assert (checkpoints / "damaged-step-00000004-1").is_dir() is aside
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)
    assert [row["step"] for row in lines(outcome.folder / "metrics.jsonl")] == list(range(1, 7))


def test_a_damaged_one_never_pushes_out_a_sound_one(recipe: dict[str, Any]) -> None:
    """One checkpoint kept: the newest is damaged, the next save must not count it as the one to keep."""
    recipe = merged(recipe, {"checkpoint.every": 2, "checkpoint.keep": 2})
    skimp.api.train(recipe, voice=Heard(stop_at=4))
    checkpoints = Path(recipe["output"]) / "checkpoints"
    flip(checkpoints / "step-00000004" / "model.safetensors")
    recipe = merged(recipe, {"checkpoint.keep": 1, "checkpoint.every": 3})
    skimp.api.train(recipe, resume=True, voice=Heard(stop_at=3))
    assert latest(checkpoints) == checkpoints / "step-00000003"
    with checkpoint_read.load(checkpoints / "step-00000003") as saved:
        saved.verify()
    damaged = checkpoint_read.load(checkpoints / "damaged-step-00000004-1")
    with damaged, pytest.raises(DamagedCheckpoint, match="its bytes changed on disk"):
        damaged.verify()


def test_when_all_are_damaged_each_is_named(recipe: dict[str, Any]) -> None:
    recipe = merged(recipe, {"checkpoint.every": 2, "checkpoint.keep": 3})
    skimp.api.train(recipe, voice=Heard(stop_at=4))
    checkpoints = Path(recipe["output"]) / "checkpoints"
    for step in (2, 4):
        flip(checkpoints / f"step-{step:08d}" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step-00000004[\s\S]*step-00000002[\s\S]*start again"):
        skimp.api.train(recipe, resume=True)
    assert len(list(checkpoints.glob("step-*/COMPLETE"))) == 2  # where nothing is gained, nothing is moved


def test_an_update_that_breaks_off_goes_back_past_a_damaged_one(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Within the living run, too."""
    from skimp.run import faults

    recipe = merged(recipe, {"checkpoint.every": 2, "checkpoint.keep": 3})
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "alone")})).folder
    passed: list[str] = []

    def at(point: str) -> None:
        if point == "update":
            passed.append(point)
            if len(passed) == 5:
                flip(Path(recipe["output"]) / "checkpoints" / "step-00000004" / "optimizer.safetensors")
                faults.exhaust()

    faults.fault_points = at
    try:
        voice = Heard()
        outcome = skimp.api.train(recipe, voice=voice)
    finally:
        faults.fault_points = None
    (note,) = outcome.summary["survived"]
    assert "went back to step-00000002" in note
    assert any("set aside as damaged-step-00000004-1" in line for line in voice.said)
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)
