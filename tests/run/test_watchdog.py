"""The watchdog acts before the kernel does, and on nothing else."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from session_cases import Heard, fingerprints, lines, merged

import skimp.api
from skimp.core.errors import OutOfMemory
from skimp.core.memory.process import Resident
from skimp.core.memory.room import Left, Room
from skimp.run import watchdog as module
from skimp.run.watchdog import MARGIN_LEAST, Watchdog

pytestmark = pytest.mark.usefixtures("plan_once")
GB = 10**9


class Blocks:
    """What a watchdog knows of a run: blocks to look before, and whether its parameters are moving."""

    def __init__(self) -> None:
        from torch import nn

        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.structure = type("S", (), {"blocks": ("0", "1")})
        self.delivery = type("D", (), {"midway": False})


class Scripted(Room):
    """Room that is told what to say; `asked` rises with every question."""

    def __init__(self, *bytes_: int) -> None:
        super().__init__(Path("/nowhere"))
        self.script, self.asked = list(bytes_), 0

    def left(self) -> Left:
        self.asked += 1
        return Left(self.script.pop(0) if len(self.script) > 1 else self.script[0], 100, "on this machine")


def sampled(dog: Watchdog, room: Scripted, times: int) -> None:
    """Let the thread sample so many times."""
    module_wait = threading.Event()
    with dog:
        while room.asked < times:
            module_wait.wait(0.001)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALM", 0.001)
    monkeypatch.setattr(module, "ALERT", 0.001)


def test_two_low_samples_in_a_row_press_and_one_does_not(quick: None) -> None:
    for script, pressed in (((500, 99, 500, 99, 500), False), ((500, 99, 99), True), ((99, 99, 500), False)):
        room = Scripted(*script)
        dog = Watchdog(Blocks(), None, room=room)
        sampled(dog, room, 8)
        assert bool(dog.pressed) is pressed, script
    assert dog.pressed == ""


def test_a_step_is_given_up_before_a_block_unless_parameters_are_moving(quick: None) -> None:
    import torch

    run, room = Blocks(), Scripted(99)
    dog = Watchdog(run, None, room=room)
    x = torch.zeros(1, 2)
    with dog:
        while not dog.pressed:
            threading.Event().wait(0.001)
        run.delivery.midway = True
        run.model(x)
        run.delivery.midway = False
        with pytest.raises(module.NearlyOut, match="99 B of memory are left on this machine, less than 100 B"):
            run.model(x)
    run.model(x)  # the hooks went with it
    assert not any(t.name == "skimp-watchdog" for t in threading.enumerate())


def test_the_budget_has_a_margin_and_mapped_files_are_not_held_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resident", lambda: Resident(GB, GB, files=10**8))
    dog = Watchdog(Blocks(), 2 * GB, margin=0.02)
    assert dog.over(Resident(GB, 2 * GB + 40_000_000, 10**8)) is None
    excess = dog.over(Resident(GB, 2 * GB + 40_000_001, 10**8))
    assert excess is not None
    assert (excess.peak, excess.budget, excess.allowed) == (2_040_000_001, 2 * GB, 2_040_000_000)
    assert str(excess) == "the process held 2.04 GB, 40.0 MB above its budget of 2.00 GB"
    # A token file of 3 GB touched from end to end: the kernel takes its pages back when it needs them.
    assert dog.over(Resident(GB, 5 * GB, files=31 * 10**8)) is None
    assert dog.highest == 5 * GB
    assert Watchdog(Blocks(), 10**8, margin=0.0).allowed == 10**8 + MARGIN_LEAST
    # The system's mark could not be set back: what was before training is not held against it.
    monkeypatch.setattr(module, "resident", lambda: Resident(GB, 3 * GB, files=10**8))
    dog = Watchdog(Blocks(), 2 * GB)
    assert dog.over(Resident(GB, 3 * GB, 10**8)) is None
    assert dog.over(Resident(GB, 3 * GB + 1, 10**8)) is not None
    assert Watchdog(Blocks(), None).over(Resident(GB, 100 * GB)) is None


def test_an_undisturbed_run_hears_nothing_of_it(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The same bits with and without, and no word."""
    kept = skimp.api.train(merged(recipe, {"budget": "64GB"}))
    assert kept.summary["survived"] == []
    assert not any("note" in row for row in lines(kept.folder / "metrics.jsonl"))
    off = merged(recipe, {"budget": "64GB", "survive": {"watchdog": False}, "output": str(tmp_path / "off")})
    other = skimp.api.train(off)
    assert fingerprints(kept.folder, 6) == fingerprints(other.folder, 6)
    assert len(fingerprints(kept.folder, 6)) == 2


def held(monkeypatch: pytest.MonkeyPatch, voice: Heard, peaks: dict[int, int]) -> None:
    """What the system reports as the highest resident size after each step; 1 MB where nothing is said."""
    from skimp.run import survive

    monkeypatch.setattr(survive, "resident", lambda: Resident(GB, peaks.get(len(voice.steps), 10**6), 0))


#: 64 rows of 128 tokens at once, so that recompute or a smaller micro-batch has some 30 MB to give back.
LARGE = {
    "exact": {"in_backward": False, "loss_chunk": 64},
    "data.seq_len": 128,
    "train.batch_tokens": 64 * 128,
    "train.steps": 4,
    "eval": None,
}


def test_above_the_budget_it_saves_plans_with_what_it_saw_and_goes_on(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = skimp.api.plan(merged(recipe, LARGE))
    budget = free.peak_bytes + 5_000_000
    recipe = merged(recipe, LARGE | {"budget": budget, "checkpoint.at_end": True})
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "alone")}))
    voice = Heard()
    # Just above the margin, which is the larger of the two.
    held(monkeypatch, voice, {3: budget + max(MARGIN_LEAST, int(0.02 * budget)) + 1_000_000})
    outcome = skimp.api.train(recipe, voice=voice)
    (note,) = outcome.summary["survived"]
    assert note.startswith("step 3: the process held ")
    assert "saved, and went on with micro-batch" in note
    assert (outcome.folder / "checkpoints" / "step-00000003" / "COMPLETE").is_file()
    plan = outcome.summary["plan"]
    assert plan["peak_bytes"] <= budget
    assert plan["places"]["host"]["baseline_bytes"] > free.places.baseline
    assert json.loads((outcome.folder / "plan.json").read_text()) == plan
    mine, theirs = (lines(folder / "metrics.jsonl") for folder in (outcome.folder, alone.folder))
    assert [row["loss"] for row in mine[:3]] == [row["loss"] for row in theirs[:3]]
    assert [row["loss"] for row in mine] == pytest.approx([row["loss"] for row in theirs], rel=1e-3)
    assert mine[3]["note"] == note


def test_above_the_budget_with_nothing_smaller_it_saves_and_ends(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    voice = Heard()
    held(monkeypatch, voice, {4: 66 * GB})
    with pytest.raises(OutOfMemory) as ended:
        skimp.api.train(merged(recipe, {"budget": "64GB"}), voice=voice)
    error = ended.value
    assert error.exit_code == 3
    assert error.found == "the process held 66.0 GB, 2.00 GB above its budget of 64.0 GB"
    assert error.instead[0].startswith("everything until step-00000004 is saved; continue: skimp train ")
    assert any("budget=66050MB" in way for way in error.instead)
    monkeypatch.undo()
    resumed = skimp.api.train(merged(recipe, {"budget": "64GB"}), resume=True)
    assert resumed.summary["steps"] == 6


def test_a_machine_that_is_nearly_out_saves_the_step_before_and_ends(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """The step that is given up is taken after the resume, from the same rows: the same bits."""
    alone = skimp.api.train(merged(recipe, {"output": str(tmp_path / "alone")})).folder
    asked, understood = [0], threading.Event()

    class Waiting(Heard):
        """Goes on after the third step once the thread has looked three times: two low samples are behind it then."""

        def step(self, progress: Any) -> None:
            super().step(progress)
            if progress.step == 3:
                assert understood.wait(60)

    voice = Waiting()
    low = Left(90 * 10**6, 128 * 10**6, "on this machine")
    plenty = Left(10**10, 128 * 10**6, "on this machine")

    def left(_room: Room) -> Left:
        if len(voice.steps) < 3:
            return plenty
        asked[0] += 1
        if asked[0] >= 3:
            understood.set()
        return low

    monkeypatch.setattr(Room, "left", left)
    with pytest.raises(OutOfMemory) as ended:
        skimp.api.train(recipe, voice=voice)
    assert ended.value.found == "90.0 MB of memory are left on this machine, less than 128 MB"
    assert "everything until step-0000000" in ended.value.instead[0]
    vitals = json.loads((Path(recipe["output"]) / "vitals.json").read_text())
    assert vitals["ended"]["kind"] == "OutOfMemory"
    monkeypatch.undo()
    resumed = skimp.api.train(recipe, resume=True)
    assert fingerprints(resumed.folder, 6) == fingerprints(alone, 6)
    assert [row["step"] for row in lines(resumed.folder / "metrics.jsonl")] == list(range(1, 7))
