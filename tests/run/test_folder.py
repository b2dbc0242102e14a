"""A folder belongs to one run and one process; metrics hold each step once whatever happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skimp.core.disk import DiskTier
from skimp.core.errors import CheckpointError
from skimp.run.folder import append_jsonl, claim, truncate_jsonl, write_json

PRINT = {"model": "smollm2", "lr": 2e-5, "shape": (3, 4)}


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_new_folder_is_claimed_and_the_run_goes_on_in_it(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "one"
    with claim(out, PRINT, resume=False) as folder:
        assert folder.run["fingerprint"] == {"model": "smollm2", "lr": 2e-5, "shape": [3, 4]}
        assert (folder.checkpoints, folder.metrics) == (out / "checkpoints", out / "metrics.jsonl")
    for _ in range(2):
        with claim(out, PRINT, resume=True) as folder:
            assert folder.path == out


def test_an_empty_folder_and_one_where_a_claim_died_are_claimed(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("99999999\n")
    (tmp_path / "run.json.tmp-99999999").write_text("{")
    claim(tmp_path, PRINT, resume=False).close()


def test_another_run_is_not_touched(tmp_path: Path) -> None:
    with claim(tmp_path, PRINT, resume=False) as folder:
        append_jsonl(folder.metrics, {"step": 1})
    before = listing(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        claim(tmp_path, {"model": "other"}, resume=False)
    assert "another run's folder: metrics.jsonl, run.json" in str(caught.value)
    assert len(caught.value.instead) == 2
    assert "no complete checkpoint" in caught.value.instead[0]
    assert listing(tmp_path) == before


def test_a_folder_without_a_step_may_be_begun_anew_and_is_released(tmp_path: Path) -> None:
    out = tmp_path / "run"
    claim(out, PRINT, resume=False).close()  # a process that died while it was planning
    (out / "checkpoints").mkdir()
    DiskTier(out / "offload").close()
    with claim(out, {"model": "other"}, resume=False) as folder:
        assert json.loads((out / "run.json").read_text())["fingerprint"] == {"model": "other"}
        folder.release()
    assert sorted(listing(out)) == [".lock"]  # it was there before this claim, so the folder stays
    (out / ".lock").unlink()
    out.rmdir()
    with claim(out, PRINT, resume=False) as folder:
        DiskTier(out / "offload").close()
        folder.release()
    assert not out.exists()
    with claim(out, PRINT, resume=False) as folder:
        append_jsonl(folder.metrics, {"step": 1})
        folder.release()
    assert sorted(listing(out)) == [".lock", "metrics.jsonl", "run.json"]


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    for index in range(8):
        (tmp_path / f"thesis{index}.txt").write_text("mine")
    before = listing(tmp_path)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"no skimp run .*thesis0.txt, .* and 2 more"):
            claim(tmp_path, PRINT, resume=resume)
    assert listing(tmp_path) == before  # not even a lock file
    with pytest.raises(CheckpointError, match="a file of that name"):
        claim(tmp_path / "thesis0.txt", PRINT, resume=False)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run there"):
        claim(tmp_path / "absent", PRINT, resume=True)
    assert not (tmp_path / "absent").exists()


def test_a_changed_recipe_is_refused_by_key_with_both_values(tmp_path: Path) -> None:
    claim(tmp_path, PRINT, resume=False).close()
    with pytest.raises(CheckpointError) as caught:
        claim(
            tmp_path,
            {"model": "smollm2", "lr": 1e-3, "seed": 1},
            resume=True,
            may_change=["train.steps", "eval"],
        )
    assert "lr: was 2e-05, now 0.001; seed: was absent, now 1; shape: was [3, 4], now absent" in str(caught.value)
    assert "free to change are: train.steps, eval" in str(caught.value)
    claim(tmp_path, PRINT, resume=True).close()  # the refusal let go of the lock


def test_a_damaged_run_file_is_said(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", '{"fingerprint": 3}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"run\.json\n.*\n  because: it is damaged"):
            claim(tmp_path, PRINT, resume=True)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        claim(tmp_path / "file" / "run", PRINT, resume=False)


HOLDER = """
import sys
from pathlib import Path
from skimp.run.folder import claim
claim(Path(sys.argv[1]), {}, resume=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_share_a_folder_and_a_dead_one_does_not_keep_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} is running there"):
            claim(out, {}, resume=True)
    finally:
        holder.kill()
        holder.communicate()
    with (
        claim(out, {}, resume=True),
        pytest.raises(CheckpointError, match=f"process {os.getpid()} is running"),
    ):
        claim(out, {}, resume=True)


def test_metrics_hold_each_step_once_after_a_death_and_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_jsonl(path, 3) == 0
    for step in range(1, 6):
        append_jsonl(path, {"step": step, "loss": 1 / step, "note": "größer"})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # cut by a full disk
    for _ in range(2):
        assert truncate_jsonl(path, 3) == 3
        for step in range(4, 8):
            append_jsonl(path, {"step": step, "loss": 1 / step})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert lines[1] == {"step": 2, "loss": 0.5, "note": "größer"}
    assert truncate_jsonl(path, 0) == 0
    assert path.read_bytes() == b""


def test_a_line_cut_at_the_resumed_step_goes(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert truncate_jsonl(path, 2) == 1
    assert path.read_text() == '{"step": 1}\n'


def test_a_metrics_line_that_is_not_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for line in ("nonsense", "{}", '{"step": "2"}', "3"):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(CheckpointError, match="m, line 2"):
            truncate_jsonl(path, 5)


def test_a_json_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"loss": 1.0})

    def halfway() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_json(path, {"loss": 2.0}, midway=halfway)
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(path.read_text()) == {"loss": 1.0}
    write_json(path, {"loss": 2.0})
    assert json.loads(path.read_text()) == {"loss": 2.0}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    monkeypatch.setattr(os, "replace", lambda *names: halfway())
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"loss": 1.0})  # until the very rename the old one stands
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads(path.read_text()) == {"loss": 2.0}
