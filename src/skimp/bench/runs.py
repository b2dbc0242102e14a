"""One run of the benchmark: a recipe, a child process through `skimp train`, and one line of results.

A finished run is one JSON line in results.jsonl, written and flushed at once. A run that was killed goes on from its
last checkpoint when the benchmark is started again, and to the same bits; its folder is removed when its line is
written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from skimp.bench.profiles import Profile, changes
from skimp.bench.tuning import Tuning
from skimp.core.child import child_environment
from skimp.core.errors import SkimpError
from skimp.core.lock import running

#: A child that was orphaned by a killed benchmark holds its folder until it ends; seconds to wait for it.
PATIENCE = 600.0
#: So often a run may be killed from outside within one call; it is not begun again then.
KILLS = 3
RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Job:
    """One run: a method at a learning rate with a seed (of the weights, the data order and everything else random)."""

    method: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.lr:g}-{self.seed}"


class Results:
    """The lines of results.jsonl that belong to one profile and text.

    A line that a kill cut short is removed when the file is opened.
    """

    def __init__(self, work: Path, digest: str) -> None:
        self.path, self.digest = work / RESULTS, digest
        self.lines: list[dict[str, Any]] = []
        if not self.path.is_file():
            return
        whole = self.path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(self.path, end)
        for number, line in enumerate(whole[:end].splitlines(), 1):
            try:
                record = json.loads(line)
                mine = record["digest"] == digest and record["status"] != "failed"
            except (ValueError, KeyError, TypeError) as error:
                raise SkimpError(
                    f"line {number} of {self.path}",
                    f"{error}",
                    "it is no result",
                    "remove that line, or name another output: --output …",
                ) from error
            if mine:
                self.lines.append(record)

    def add(self, record: dict[str, Any]) -> None:
        """Append one line, on the disk before this returns."""
        with self.path.open("ab") as out:
            out.write(json.dumps({"digest": self.digest, **record}).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        self.lines.append(record)

    def losses(self, method: str) -> dict[tuple[float, int], float]:
        """Held-out loss by (rate, seed); infinite for a run that diverged or was refused."""
        own = (r for r in self.lines if r["method"] == method)
        return {(r["lr"], r["seed"]): math.inf if r["loss"] is None else r["loss"] for r in own}

    def refused(self, method: str) -> str:
        """Why the method cannot be run at all, or nothing."""
        own = (r for r in self.lines if r["method"] == method)
        return next((r["why"] for r in own if r["status"] in ("refused", "failed")), "")


def recipe_of(profile: Profile, job: Job, work: Path) -> dict[str, Any]:
    """The recipe of a run. Exact choices are pinned, so that times and peaks of methods compare."""
    folder = work / f"model-{profile.name}"
    rows = profile.batch_tokens // profile.seq
    base: dict[str, Any] = {
        "model": {"name": str(folder), "init": "scratch", "seed": job.seed},
        "data": {
            "train": str(folder / "text.jsonl"),
            "seq_len": profile.seq,
            "packing": True,
            "validation": 0.05,
            "seed": job.seed,
        },
        "train": {
            "steps": profile.steps,
            "batch_tokens": profile.batch_tokens,
            "lr": job.lr,
            "warmup": profile.warmup,
            "min_lr": 0.1,
            "seed": job.seed,
        },
        "eval": {"at_start": False, "at_end": True, "tokens": profile.eval_tokens},
        "checkpoint": {"every": 100, "at_end": True, "keep": 1},
        "exact": {"micro_batch": rows, "recompute": "none", "in_backward": False},
        "report": False,
        "output": str(work / "runs" / job.name),
    }
    for key, value in changes(job.method, profile).items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return base


def run(
    profile: Profile | Tuning,
    job: Job,
    work: Path,
    threads: int,
    started: Callable[[Any], None],
    recipe: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Run a job to its end, or go on with it; its record, or None when it was stopped from outside.

    Args:
        threads: of the child.
        started: told of the child process, so that it can be stopped.
        recipe: of the run, its output `runs/<name of the job>` in `work`; None: that of a pre-training.
    """
    if recipe is None:
        assert isinstance(profile, Profile)
        recipe = recipe_of(profile, job, work)
    folder = work / "runs" / job.name
    begin, code, said = time.monotonic(), 0, ""
    if not (folder / "summary.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = _recipe_file(folder)
        path.write_text(json.dumps(recipe), encoding="utf-8")
        code, said = _train(path, folder, threads, started)
    if code in (130, 143) or code < 0:
        return None
    return _record(profile, job, time.monotonic() - begin, _read(folder, said, code))


def killed(profile: Profile | Tuning, job: Job) -> dict[str, Any]:
    """The record of a run that was killed too often; tried anew by the next call."""
    why = f"killed from outside {KILLS} times, as the system does when memory runs out"
    return _record(profile, job, 0.0, {"status": "failed", "loss": None, "why": why})


def untrained(profile: Profile | Tuning, job: Job) -> dict[str, Any]:
    """The record of a model that is taken as it is."""
    return _record(profile, job, 0.0, {"status": "done", "loss": None})


def _record(profile: Profile | Tuning, job: Job, seconds: float, found: dict[str, Any]) -> dict[str, Any]:
    about = {"profile": profile.name, "method": job.method, "lr": job.lr, "seed": job.seed}
    return about | found | {"wall_seconds": seconds, "date": time.strftime("%Y-%m-%d")}


def clean(work: Path, job: Job) -> None:
    """Remove the folder of a run whose line is written."""
    folder = work / "runs" / job.name
    shutil.rmtree(folder, ignore_errors=True)
    _recipe_file(folder).unlink(missing_ok=True)


def _recipe_file(folder: Path) -> Path:
    """Beside the run's folder. Its whole name: the dot of a learning rate begins no suffix."""
    return folder.with_name(f"{folder.name}.yaml")


def wait_for_orphans(work: Path) -> None:
    """Until no run of an earlier call, whose benchmark was killed, is left running in `work`.

    Raises:
        SkimpError: one still runs after `PATIENCE`.
    """
    until = time.monotonic() + PATIENCE
    for folder in sorted((work / "runs").glob("*/")):
        while running(folder):
            if time.monotonic() >= until:
                _refuse(folder)
            time.sleep(1.0)


def _refuse(folder: Path) -> None:
    raise SkimpError(
        f"a benchmark's run in {folder}",
        "another process runs there",
        "the two would destroy each other's checkpoints",
        ["wait for it, or stop it", "name another output: --output …"],
    )


def _train(recipe: Path, folder: Path, threads: int, started: Callable[[Any], None]) -> tuple[int, str]:
    """Start, or resume what a killed benchmark left."""
    if running(folder):
        _refuse(folder)
    words = [str(folder), "--resume"]
    if not any(folder.glob("checkpoints/step-*/COMPLETE")):
        words = [str(recipe)]
        if folder.exists():
            shutil.rmtree(folder)  # nothing was saved in it
    env = child_environment(OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false")
    argv = [sys.executable, "-m", "skimp.cli.main", "train", *words, "--quiet"]
    child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started(child)
    said = child.communicate()[0]
    return child.returncode, said


def _read(folder: Path, said: str, code: int) -> dict[str, Any]:
    """What a finished run's folder says; else whether it diverged, was refused, or failed (a bug; tried anew next
    time)."""
    if code not in (0, 2, 3):
        return {"status": "failed", "loss": None, "why": f"exit code {code}: {said.strip()[-300:]}"}
    if code:
        diverged = "finite" in said
        why = next((line for line in reversed(said.strip().splitlines()) if line.startswith("skimp:")), said[-300:])
        return {"status": "diverged" if diverged else "refused", "loss": None, "why": why}
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    loss = summary["eval_loss_after"]
    rules = json.loads((folder / "optimizer.json").read_text(encoding="utf-8"))
    return {
        "status": "done",
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "train_loss": summary["loss_last"],
        "trained": summary["plan"]["trained"],
        "state_bytes": rules["state_bytes"],
        "planned_peak_bytes": summary["planned_peak_bytes"],
        "peak_bytes": summary["measured_peak_bytes"],
        "resident_bytes": summary["rss_peak_bytes"],
        "seconds_per_step": median(seconds[1:] or seconds),
        "steps": summary["steps"],
        "versions": summary["versions"],
    }
