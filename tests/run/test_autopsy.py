"""What a dead run's folder says: every verdict from a real folder, the advice with its bytes, the command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skimp
from skimp.core.errors import CheckpointError, NonFiniteError
from skimp.recipe import load_recipe
from skimp.recipe.host import HostBudget
from skimp.run.doctor import advice, remains, verdict
from skimp.run.doctor.autopsy import Autopsy, autopsy
from skimp.run.doctor.verdict import KINDS
from skimp.run.vitals import CRASH, VITALS, boot_id, process_birth

GB = 10**9


@pytest.fixture
def trained(recipe: dict[str, Any], plan_once: None) -> Path:
    """A whole run of six steps with a checkpoint after four of them and after the last."""
    return skimp.train(recipe, "checkpoint.every=4").folder


@pytest.fixture
def died(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Autopsy]:
    """The same folder as a death in step 6 leaves it, with other last words; then the autopsy."""

    def make(room: int = 20 * GB, saved: bool = True, steps: int = 5, **words: Any) -> Autopsy:
        import shutil

        shutil.rmtree(trained / "checkpoints" / "step-00000006", ignore_errors=True)
        if not saved:
            shutil.rmtree(trained / "checkpoints")
        (trained / "summary.json").unlink(missing_ok=True)
        rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()[:steps]]
        (trained / "metrics.jsonl").write_text("".join(json.dumps(r | {"seconds": 300.0}) + "\n" for r in rows))
        now = time.time()
        last = {
            "pid": 2**22 + 1, "born": 5, "host": platform.node(), "boot": boot_id(), "started": now - 100,
            "time": now - 1, "phase": "train", "step": steps, "steps": 6, "rss": 2 * GB, "peak": 2 * GB,
            "left": 10 * GB, "left_why": "memory available on this machine", "budget": 3 * GB, "planned": 2 * GB,
        } | words  # fmt: skip
        (trained / VITALS).write_text(json.dumps(last))
        monkeypatch.setattr(remains, "host_budget", lambda: HostBudget(room, "free"))
        return autopsy(trained)

    return make


def ended(**how: Any) -> dict[str, Any]:
    return {"time": time.time(), "how": "error", "kind": "RuntimeError", "message": "x", **how}


def test_a_finished_run_is_well(trained: Path) -> None:
    found = autopsy(trained)
    assert (found.verdict.kind, found.verdict.well, found.changes) == ("finished", True, ())
    assert found.command == f"skimp train {trained} --resume train.steps=12"
    assert json.loads(json.dumps(found.as_dict()))["checkpoint_step"] == 6


def test_a_death_without_a_word_says_what_is_lost_and_how_to_go_on(died: Callable[..., Autopsy]) -> None:
    found = died()
    assert (found.verdict.kind, found.verdict.sure) == ("killed", False)
    assert "step 6 of 6" in found.verdict.evidence[0]
    assert "2.00 GB" in found.verdict.evidence[0]
    assert "memory was not scarce" in found.verdict.evidence[-1]
    kept = found.kept()
    assert "step-00000004" in kept[0]
    assert kept[1] == "lost: step 5, 5 min 00 s of work"
    assert [c.what for c in found.changes] == ["checkpoint.every=2"]
    assert found.command == f"skimp train {found.seen.folder} --resume checkpoint.every=2"
    load_recipe(found.seen.recipe, [c.what for c in found.changes if c.override])


def test_scarce_memory_is_a_kernels_kill_and_the_budget_leaves_room(died: Callable[..., Autopsy]) -> None:
    found = died(room=2 * GB, left=20_000_000, peak=2_300_000_000)
    assert (found.verdict.kind, found.verdict.sure) == ("killed for memory", False)
    # 2 GB, less 100 MB + 3 % kept free, less the 300 MB it took beyond its plan: 1.54 GB.
    assert found.changes[0].what == "budget=1540MB"
    assert "300 MB more than planned" in found.changes[0].why
    assert "budget=1540MB" in found.command
    assert load_recipe(found.seen.recipe, ["budget=1540MB"]).budget.host == 1_540_000_000


def test_a_count_of_kills_since_is_evidence(died: Callable[..., Autopsy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remains, "oom_kills", lambda: 5)
    found = died(oom_kills=4, left=20_000_000)
    assert "very likely" in found.verdict.headline
    assert any("killed 1 process " in line for line in found.verdict.evidence)
    assert died(oom_kills=5).verdict.kind == "killed"
    assert died(oom_kills=4, boot="another").seen.oom_kills_since is None


def test_the_kernels_log_is_proof(
    died: Callable[..., Autopsy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = f"[ 9.1] Out of memory: Killed process {2**22 + 1} (python) total-vm:9kB\n"
    fake = tmp_path / "dmesg"
    fake.write_text(f"#!/bin/sh\nprintf '%s' '{log}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = died()
    assert (found.verdict.kind, found.verdict.sure) == ("killed for memory", True)
    assert "Killed process" in found.verdict.evidence[-1]
    assert died(pid=2**22 + 11).verdict.kind == "killed"


def test_memory_that_others_held_is_not_answered_with_a_budget(died: Callable[..., Autopsy]) -> None:
    found = died(room=20 * GB, left=1_000_000)
    assert found.changes[0].what == "nothing about its memory"
    assert "budget=" not in found.command


def test_a_machine_too_small_for_the_process_alone(died: Callable[..., Autopsy]) -> None:
    assert died(room=300_000_000, left=0).changes[0].what.startswith("end other programs")


def test_offers_are_named_when_nothing_exact_is_that_small(died: Callable[..., Autopsy]) -> None:
    found = died(room=2 * GB, left=0)
    way = {"label": "8-bit states", "peak_bytes": GB, "exact": False, "overrides": ["optimizer=adamw8bit"]}
    seen = replace(found.seen, plan=found.seen.plan | {"peak_bytes": 2 * GB, "alternatives": [way]})
    changes, _ = advice.advise(seen, found.verdict)
    assert changes[1].what == "optimizer=adamw8bit"
    assert "new run" in changes[1].why
    assert not changes[1].override


def test_growing_memory_is_named(died: Callable[..., Autopsy]) -> None:
    found = died()
    seen = replace(found.seen, metrics=replace(found.seen.metrics, early=GB, memory=2 * GB, step=40))
    assert any("memory grew from 1.00 GB" in line for line in verdict.judge(seen).evidence)


def test_refused_memory_and_a_full_disk(died: Callable[..., Autopsy]) -> None:
    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
    assert died(ended=ended(message=message)).verdict.kind == "memory refused"
    full = died(
        ended=ended(kind="CheckpointError", errno=28, asked="saving", found="full", why="", instead=["free 1 GB"])
    )
    assert full.verdict.kind == "disk"
    assert [c.what for c in full.changes][:2] == ["free space there", "checkpoint.keep=1"]
    limit = died(ended=ended(kind="CheckpointError", errno=27, asked="saving", found="large", why="", instead=[]))
    assert limit.changes[0].what == "ulimit -f unlimited"


def test_a_run_that_stopped_itself_for_memory(died: Callable[..., Autopsy], trained: Path) -> None:
    error = {"asked": "step 6 within memory", "found": "refused", "why": "nothing smaller", "instead": ["--resume"]}
    died()
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["note"] = "step 5: one row at a time"
    (trained / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert remains.gather(trained).metrics.notes == ("step 5: one row at a time",)
    found = autopsy_after(died, rows, ended=ended(kind="OutOfMemory", **error))
    assert (found.verdict.kind, found.verdict.sure) == ("memory refused", True)
    assert "before that, step 5: one row at a time" in found.verdict.evidence
    assert found.changes[0].what == "nothing about its memory"


def autopsy_after(died: Callable[..., Autopsy], rows: list[dict[str, Any]], **words: Any) -> Autopsy:
    """An autopsy whose metrics keep their notes."""
    found = died(**words)
    metrics = replace(found.seen.metrics, notes=tuple(row["note"] for row in rows if "note" in row))
    seen = replace(found.seen, metrics=metrics)
    return replace(found, seen=seen, verdict=verdict.judge(seen))


def test_a_bad_number_goes_to_a_new_run_with_half_the_rate(died: Callable[..., Autopsy]) -> None:
    error = NonFiniteError("a finite loss in step 6", "nan", "it spreads", ["lower train.lr"])
    words = {key: getattr(error, key) for key in ("asked", "found", "why", "instead")}
    found = died(ended=ended(kind="NonFiniteError", message=str(error), **words))
    assert found.verdict.kind == "not finite"
    assert "a finite loss in step 6: nan" in found.verdict.evidence
    assert found.changes[0].what == "lower train.lr"
    assert "train.lr=0.005" in found.command
    assert f"output={found.seen.folder}-again" in found.command


def test_other_ends(died: Callable[..., Autopsy]) -> None:
    assert died(ended=ended(how="SIGTERM")).verdict.kind == "stopped"
    assert died(ended=ended(kind="KeyboardInterrupt")).verdict.kind == "interrupted"
    bug = died(ended=ended(kind="IndexError", where=["  File a.py"]))
    assert (bug.verdict.kind, bug.verdict.evidence[-1]) == ("error", "  File a.py")
    assert died(boot="another").verdict.kind == "machine restarted"
    assert died(host="another").verdict.kind == "elsewhere"


def test_a_crash_shows_its_stack(died: Callable[..., Autopsy], trained: Path) -> None:
    (trained / CRASH).write_text("Fatal Python error: Illegal instruction\n\n  File swiglu\n")
    found = died()
    assert (found.verdict.kind, found.verdict.headline) == ("crashed", "crashed: Illegal instruction")
    assert any("--check" in c.what for c in found.changes)
    assert "exact.kernels=plain" in found.command


def test_without_a_checkpoint_it_begins_again_elsewhere(died: Callable[..., Autopsy]) -> None:
    found = died(saved=False)
    assert "no complete checkpoint" in found.kept()
    assert f"/recipe.json output={found.seen.folder}-again" in found.command


def test_half_a_checkpoint_and_half_a_line(died: Callable[..., Autopsy], trained: Path) -> None:
    died()
    half = trained / "checkpoints" / "step-00000005.tmp-4194305"
    half.mkdir()
    with (trained / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    (trained / "plan.json").write_text("{")
    kept = autopsy(trained).kept()
    assert any("the save did not finish" in line for line in kept)
    assert any("metrics.jsonl is cut" in line for line in kept)
    assert any(line.startswith("damaged: plan.json") for line in kept)


def test_living_paused_and_silent(died: Callable[..., Autopsy]) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        alive = {"pid": child.pid, "born": process_birth(child.pid)}
        assert died(**alive).verdict.kind == "running"
        assert died(**alive, time=time.time() - 60).verdict.kind == "stuck"
        child.send_signal(19)
        for _ in range(500):
            if remains.process_state(child.pid) == "T":
                break
            time.sleep(0.01)
        paused = died(**alive)
        assert (paused.verdict.kind, paused.command) == ("paused", f"kill -CONT {child.pid}")
        assert died(pid=child.pid, born=1).verdict.kind == "killed"  # the number was given to another process
    finally:
        child.kill()
        child.wait()


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


def test_a_folder_of_an_older_skimp(trained: Path) -> None:
    (trained / VITALS).unlink()
    assert autopsy(trained).verdict.kind == "finished"
    (trained / "summary.json").unlink()
    found = autopsy(trained)
    assert (found.verdict.kind, found.verdict.sure) == ("killed", False)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(trained / ".lock")],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert autopsy(trained).verdict.kind == "running"
    finally:
        child.kill()
        child.wait()


def test_what_is_no_run_is_refused_with_the_runs_near_it(trained: Path) -> None:
    with pytest.raises(CheckpointError, match=str(trained)):
        autopsy(trained.parent)
    with pytest.raises(CheckpointError, match="no such folder"):
        autopsy(trained.parent / "absent")


def test_every_kind_says_whether_it_is_well() -> None:
    source = Path(verdict.__file__).read_text(encoding="utf-8")
    assert all(f'"{kind}"' in source.split("KINDS = {")[0] + source.split("}\n", 1)[1] for kind in KINDS)
