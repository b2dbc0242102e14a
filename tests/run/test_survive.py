"""Memory that runs short in a step: nothing learned is lost, and what is repeated is repeated bit for bit.

The allocator's own refusal is provoked in the middle of a forward pass, of a backward pass and of the updates. The
oracle is the run that was left alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, fingerprints, lines, merged

import skimp.api
from skimp.core.errors import NonFiniteError, OutOfMemory
from skimp.run import faults

pytestmark = pytest.mark.usefixtures("plan_once")

HELD = {"checkpoint.every": 2}
#: Stepping in backward: parameters move while gradients still come.
MOVING = {"exact.in_backward": True, "exact.micro_batch": 4, "train.clip": None}


@pytest.fixture(autouse=True)
def _no_fault_left() -> Any:
    yield
    faults.fault_points = None


def refuse(point: str, times: tuple[int, ...]) -> list[int]:
    """Refuse memory at these passages of a point; returns a list that counts all passages."""
    passed: list[int] = []

    def at(reached: str) -> None:
        if reached == point:
            passed.append(len(passed) + 1)
            if len(passed) in times:
                faults.exhaust()

    faults.fault_points = at
    return passed


NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "clip_scale")


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    return [tuple(row[k] for k in NUMBERS) for row in lines(folder / "metrics.jsonl")]


def whole(recipe: dict[str, Any], tmp_path: Path) -> Path:
    return skimp.api.train(merged(recipe, {"output": str(tmp_path / "whole")})).folder


#: (where, changes, passage refused, what it says of the step).  Two micro-batches a step when gradients are held.
CASES = {
    "forward": ("forward", HELD, 8, "the step is taken again"),
    "backward": ("backward", HELD, 8, "the step is taken again"),
    "update": ("update", HELD, 4, "went back to step-00000002"),
    "update-first-step": ("update", HELD, 1, "went back to the beginning"),
    "moving-forward": ("forward", HELD | MOVING, 4, "the step is taken again"),
    "moving-backward": ("backward", HELD | MOVING, 4, "went back to step-00000002"),
    "moving-update": ("update", HELD | MOVING, 6, "went back to step-00000004"),
    "bf16-update": ("update", HELD | {"precision": "bf16"}, 3, "went back to step-00000002"),
    "bf16-8bit-backward": (
        "backward",
        HELD | MOVING | {"precision": "bf16", "optimizer": "adamw8bit"},
        5,
        "went back to step-00000004",
    ),
    "streaming": (
        "update",
        HELD | {"data.streaming": True, "data.validation": None, "eval": None},
        4,
        "went back to step-00000002",
    ),
}
AWAY = {"exact.offload": {"activations": "disk", "blocks": 2, "optimizer": "disk"}}
CASES["offloaded-forward"] = ("forward", HELD | AWAY, 8, "the step is taken again")
CASES["offloaded-backward"] = ("backward", HELD | AWAY, 8, "the step is taken again")
CASES["offloaded-update"] = ("update", HELD | AWAY, 4, "went back to step-00000002")
CASES["offloaded-update-first-step"] = ("update", HELD | AWAY, 1, "went back to the beginning")
CASES["lora-update"] = ("update", HELD | {"adapter": {"r": 4, "dropout": 0.1}}, 4, "went back to step-00000002")
CASES["lora-backward-first"] = ("backward", HELD | {"adapter": {"r": 4, "dropout": 0.1}}, 1, "the step is taken again")
CASES["lora-update-first"] = ("update", HELD | {"adapter": {"r": 4, "dropout": 0.1}}, 1, "went back to the beginning")
#: What happened every so many steps is undone: the base that was added to, the bases of spectra.
for _name in ("relora", "sst"):
    CASES[f"{_name}-update"] = (
        "update", HELD | {"adapter": {"name": _name, "r": 4, "every": 3, "warmup": 1}}, 4, "went back to step-00000002"
    )  # fmt: skip
ALWAYS = (
    "offloaded-backward",
    "offloaded-update",
    "forward",
    "backward",
    "update",
    "update-first-step",
    "moving-backward",
    "lora-update",
    "relora-update",
)


@pytest.mark.parametrize("case", [c if c in ALWAYS else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_an_unchanged_plan_gives_the_bits_of_the_run_left_alone(
    case: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    """Every exact choice is pinned, so the step is taken again under the plan it had."""
    point, changes, passage, said = CASES[case]
    recipe = merged(recipe, changes)
    alone = whole(recipe, tmp_path)
    passed, voice = refuse(point, (passage,)), Heard()
    outcome = skimp.api.train(recipe, voice=voice)
    assert len(passed) > passage
    assert outcome.stopped == "finished"
    assert numbers(outcome.folder) == numbers(alone)
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)
    assert len(fingerprints(outcome.folder, 6)) == 2
    (note,) = outcome.summary["survived"]
    assert note in voice.said
    assert "memory was refused while the process held" in note
    assert said in note
    (noted,) = [row["note"] for row in lines(outcome.folder / "metrics.jsonl") if "note" in row]
    assert noted == note


def test_the_random_state_is_that_of_the_step_before(recipe: dict[str, Any]) -> None:
    states: list[torch.Tensor] = []
    passed: list[int] = []

    def at(point: str) -> None:
        if point == "forward":
            passed.append(1)
            states.append(torch.get_rng_state())
            if len(passed) == 5:
                faults.exhaust()

    faults.fault_points = at
    skimp.api.train(recipe)
    assert all(torch.equal(state, states[0]) for state in states)


def test_it_goes_on_smaller_where_the_planner_may_choose(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Micro-batch of four rows, refused once: the rest of the run takes fewer rows at once or recomputes."""
    recipe = merged(recipe, {"exact": {"in_backward": False, "loss_chunk": 64}, "data.seq_len": 64})
    recipe = merged(recipe, {"train.batch_tokens": 256, "checkpoint.every": 2})
    passed, voice = refuse("backward", (4,)), Heard()
    outcome = skimp.api.train(recipe, voice=voice)
    (note,) = outcome.summary["survived"]
    assert outcome.stopped == "finished"
    before, after = voice.plans[-1].as_dict(), outcome.summary["plan"]
    assert after["chosen"] != before["chosen"]
    assert after["phases"]["train"] < before["phases"]["train"]
    assert "with micro-batch" in note
    assert len(passed) > 4
    assert outcome.summary["measured_peak_bytes"] == after["phases"]["train"]
    faults.fault_points = None
    alone = numbers(whole(recipe, tmp_path))
    for mine, theirs in zip(numbers(outcome.folder), alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)  # sums of a step are formed in another order from step 4 on
    assert numbers(outcome.folder)[:3] == alone[:3]


def test_it_ends_when_it_never_fits_and_says_what_to_do(recipe: dict[str, Any]) -> None:
    recipe = merged(recipe, {"survive": {"retries": 2}})
    refuse("backward", tuple(range(5, 100)))
    voice = Heard()
    with pytest.raises(OutOfMemory) as stopped:
        skimp.api.train(recipe, voice=voice)
    error = stopped.value
    assert error.exit_code == 3
    assert error.asked == "optimizer step 3 within memory"
    assert "no smaller plan" in error.why
    assert any(f"skimp train {recipe['output']} --resume" in way for way in error.instead)
    folder = Path(recipe["output"])
    assert (folder / "checkpoints" / "step-00000002" / "COMPLETE").is_file()
    faults.fault_points = None
    again = skimp.api.train(recipe, resume=True)
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == list(range(1, 7))
    assert again.stopped == "finished"


def test_no_retries_means_the_first_one_ends_it(recipe: dict[str, Any]) -> None:
    refuse("forward", (1,))
    with pytest.raises(OutOfMemory, match=r"tried again 0 times[\s\S]*nothing was learned yet"):
        skimp.api.train(merged(recipe, {"survive.retries": 0, "eval": None}))


def test_an_evaluation_that_runs_short_is_done_again(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skimp.run.session import _Beside

    recipe = merged(recipe, {"eval.every": 2})
    alone = whole(recipe, tmp_path)
    real, calls = _Beside.evaluate, []

    def evaluate(self: _Beside) -> Any:
        calls.append(1)
        if len(calls) in (1, 3, 6):  # before training, within it, after it
            faults.exhaust()
        return real(self)

    monkeypatch.setattr(_Beside, "evaluate", evaluate)
    outcome = skimp.api.train(recipe)
    assert len(outcome.summary["survived"]) == 3
    assert lines(outcome.folder / "evals.jsonl") == lines(alone / "evals.jsonl")
    assert fingerprints(outcome.folder, 6) == fingerprints(alone, 6)


def test_another_error_of_the_same_class_is_not_taken_for_one(recipe: dict[str, Any]) -> None:
    def at(point: str) -> None:
        if point == "backward":
            raise RuntimeError("shape '[4]' is invalid")

    faults.fault_points = at
    with pytest.raises(RuntimeError, match="is invalid"):
        skimp.api.train(recipe)


def test_tensors_of_the_step_are_gone_before_it_is_tried_again(recipe: dict[str, Any]) -> None:
    """An exception's traceback holds every local of every frame, so the whole step's activations."""
    import gc

    sizes: list[int] = []
    passed: list[int] = []

    def alive() -> int:
        return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor and t.is_floating_point())

    def at(point: str) -> None:
        if point == "forward":
            passed.append(1)
            sizes.append(alive())
        if point == "backward" and len(passed) == 3 and len(sizes) == 3:
            faults.exhaust()

    faults.fault_points = at
    # States on a disk and results that a recomputed block keeps are tensors too, of the plan and not of the exception.
    skimp.api.train(merged(recipe, {"eval": None, "exact.offload.optimizer": "none", "exact.keep": "nothing"}))
    # The same micro-batch, first and second time, but for 64 numbers of each parameter that the effect check keeps:
    # not one hidden state of two rows is left.
    assert 0 <= sizes[3] - sizes[2] < 2 * 32 * 64


def test_memory_refused_while_loading_is_a_sentence(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skimp.run.session.load_weights", lambda *_: faults.exhaust())
    with pytest.raises(
        OutOfMemory, match=r"phase 'load' within memory[\s\S]*were refused[\s\S]*plan for less: budget="
    ):
        skimp.api.train(recipe)
    assert not Path(recipe["output"]).exists()  # it left the folder as it was


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_leaves_the_run_at_a_sound_state(
    clip: float | None, recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping parameters have moved by then: the last checkpoint is where the run stands."""
    recipe = merged(recipe, {**MOVING, "checkpoint.every": 2, "train.clip": clip})
    alone = whole(recipe, tmp_path)
    armed, times = faults.arm, []

    def poison(run: Any) -> None:
        armed(run)
        block = run.model.get_submodule(run.structure.blocks[1])

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            times.append(1)
            return gradient * float("nan") if len(times) == (4 if clip is None else 7) else gradient

        def watch(_module: Any, _inputs: Any, out: torch.Tensor) -> None:
            if out.requires_grad:
                out.register_hook(spoil)

        block.register_forward_hook(watch)

    monkeypatch.setattr(faults, "arm", poison)
    with pytest.raises(NonFiniteError, match="optimizer step 4") as stopped:
        skimp.api.train(recipe)
    folder = Path(recipe["output"])
    newest = sorted((folder / "checkpoints").glob("step-*/COMPLETE"))[-1].parent.name
    assert ("parameters had moved" in stopped.value.found) is (clip is None)
    assert newest == ("step-00000002" if clip is None else "step-00000003")
    resumed = skimp.api.train(recipe, resume=True)
    assert fingerprints(resumed.folder, 6) == fingerprints(alone, 6)
