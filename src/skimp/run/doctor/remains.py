"""Everything a run's folder tells, read without changing it and without the process that wrote it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skimp.core.errors import CheckpointError, SkimpError
from skimp.core.lock import LOCK
from skimp.recipe.host import host_budget
from skimp.run.checkpoint_folder import complete_steps, problem, step_of
from skimp.run.folder import RUN
from skimp.run.vitals import CRASH, boot_id, oom_kills, process_birth, process_state, read

#: Running; stopped by SIGSTOP or Ctrl-Z; on another machine; gone; a folder that does not tell.
Life = Literal["running", "paused", "elsewhere", "dead", "unknown"]


@dataclass(frozen=True)
class Metrics:
    """metrics.jsonl in a few numbers.

    Attributes:
        step: of the last whole line; 0 without one.
        loss, memory: of that line; memory in bytes.
        after: steps behind the newest complete checkpoint, and the seconds they took.
        seconds: mean of the last ten steps.
        early: resident bytes in the third step of the file.
        torn: the last line is cut, as a death or a full disk leaves it.
        notes: the last three of what the run went on after, such as a step that was refused memory.
    """

    step: int = 0
    loss: float | None = None
    memory: int | None = None
    after: int = 0
    after_seconds: float = 0.0
    seconds: float = 0.0
    early: int | None = None
    torn: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Remains:
    """A run's folder.

    Attributes:
        folder: where.
        life: what became of the process.
        vitals: the last sign of life (`skimp.run.vitals`); empty where there is none.
        recipe, plan, summary: the content of those files; empty where absent or damaged.
        metrics: what was trained.
        newest: the newest complete checkpoint; newest_step and newest_bytes with it.
        broken: a sentence on each checkpoint that is not complete.
        crash: the first lines of what a fatal signal left.
        disk_free: bytes free where the folder is.
        room: bytes a process of this machine may take now, and what sets the figure.
        oom_kills_since: processes the kernel killed for want of memory since the session began; None: not told.
        state: of the process, as in proc(5).
        damaged: files that cannot be read.
        now: seconds since the epoch at which all this was seen.
    """

    folder: Path
    life: Life
    vitals: dict[str, Any]
    recipe: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    metrics: Metrics
    newest: Path | None = None
    newest_step: int = 0
    newest_bytes: int = 0
    broken: tuple[str, ...] = ()
    crash: str = ""
    disk_free: int = 0
    room: int | None = None
    room_why: str = ""
    oom_kills_since: int | None = None
    state: str = ""
    damaged: tuple[str, ...] = ()
    now: float = field(default_factory=time.time)

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run, where it is known."""
        found: int | None = self.vitals.get("steps") or self.recipe.get("train", {}).get("steps")
        return found

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return max(self.metrics.step, self.vitals.get("step") or 0)


def gather(folder: Path) -> Remains:
    """Read a run's folder.

    Raises:
        CheckpointError: no such folder, or no run in it.
    """
    if not folder.is_dir() or not any((folder / name).exists() for name in (RUN, "recipe.json", "metrics.jsonl")):
        raise CheckpointError(
            f"the run in {folder}",
            "no such folder" if not folder.exists() else f"no run there (no {RUN})",
            "a run that ends before its first step takes its folder along" if not folder.exists() else "",
            [*_runs_near(folder), "skimp doctor: look at the machine"],
        )
    damaged: list[str] = []
    recipe, plan, summary = (_load(folder / f"{name}.json", damaged) for name in ("recipe", "plan", "summary"))
    vitals = read(folder) or {}
    newest, broken = _checkpoints(folder / "checkpoints")
    step = step_of(newest) if newest else 0
    room, room_why = _room()
    before, now = vitals.get("oom_kills"), oom_kills()
    same_boot = vitals.get("boot") == boot_id() and vitals.get("host") == platform.node()
    return Remains(
        folder,
        life_of(folder, vitals),
        vitals,
        recipe,
        plan,
        summary,
        metrics=_metrics(folder / "metrics.jsonl", step),
        newest=newest,
        newest_step=step,
        newest_bytes=_size(newest) if newest else 0,
        broken=broken,
        crash=_text(folder / CRASH),
        disk_free=shutil.disk_usage(folder).free,
        room=room,
        room_why=room_why,
        oom_kills_since=now - before if same_boot and now is not None and before is not None else None,
        state=process_state(vitals.get("pid", 0)),
        damaged=tuple(damaged),
    )


def life_of(folder: Path, vitals: dict[str, Any]) -> Life:
    """What became of the process that wrote `vitals`; without them, whether anybody holds the folder's lock."""
    if not vitals:
        return _by_lock(folder / LOCK)
    if "ended" in vitals:
        return "dead"
    if vitals["host"] != platform.node():
        return "elsewhere"
    if vitals["boot"] != boot_id():
        return "dead"
    pid, state = vitals["pid"], process_state(vitals["pid"])
    if state and process_birth(pid) == vitals["born"] and state not in ("Z", "X"):
        return "paused" if state in ("T", "t") else "running"
    if vitals["born"] is None:  # no /proc: the number alone decides
        return "running" if _exists(pid) else "dead"
    return "dead"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _by_lock(path: Path) -> Life:
    """The lock of a folder without signs of life. It is looked up in the system's list, never taken: a run that
    begins at this moment must not find it held."""
    try:
        at = path.stat()
        held = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "unknown"
    name = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}:{at.st_ino}"
    return "running" if any("FLOCK" in line and name in line.split() for line in held) else "dead"


def _checkpoints(root: Path) -> tuple[Path | None, tuple[str, ...]]:
    if not root.is_dir():
        return None, ()
    try:
        good, bad = complete_steps(root)
    except CheckpointError as error:  # one of a newer skimp: it may well be complete
        return None, (f"{error.asked}: {error.found}; {error.why}",)
    newest = good[-1] if good else None
    return newest, tuple(bad) if newest is None else tuple(b for b in bad if not _older(b, newest))


def _size(folder: Path) -> int:
    """Bytes of its files; a living run may be removing them."""
    total = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _older(sentence: str, newest: Path) -> bool:
    """Whether a broken checkpoint is older than the newest whole one, and so of no interest."""
    path = Path(sentence.partition(": ")[0])
    try:
        return step_of(path) < step_of(newest) and bool(problem(path))
    except CheckpointError:
        return False


def _metrics(path: Path, saved: int) -> Metrics:
    """One pass, line by line: a long run's file is large."""
    last: dict[str, Any] = {}
    recent: list[float] = []
    notes: list[str] = []
    after, after_seconds, torn, early = 0, 0.0, False, None
    for number, (row, whole) in enumerate(_rows(path)):
        torn = not whole
        if not whole:
            break
        last = row
        early = row.get("memory_bytes") if number == 2 else early
        recent = [*recent[-9:], float(row.get("seconds") or 0)]
        notes += [str(row["note"])] if row.get("note") else []
        if row["step"] > saved:
            after, after_seconds = after + 1, after_seconds + recent[-1]
    if not last:
        return Metrics(torn=torn)
    mean = sum(recent) / len(recent)
    loss, memory = last.get("loss"), last.get("memory_bytes")
    return Metrics(last["step"], loss, memory, after, after_seconds, mean, early, torn, tuple(notes[-3:]))


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    """(row, True) of every whole line; ({}, False) of one that is cut or damaged."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                yield (row, True) if line.endswith(b"\n") and isinstance(row["step"], int) else ({}, False)
            except (ValueError, KeyError, TypeError):
                yield {}, False


def _load(path: Path, damaged: list[str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        damaged.append(f"{path.name}: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _text(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[:lines])
    except OSError:
        return ""


def _room() -> tuple[int | None, str]:
    try:
        here = host_budget()
    except SkimpError:
        return None, ""
    return here.bytes, here.why


def _runs_near(folder: Path) -> list[str]:
    """Runs inside the folder, or beside one that does not exist."""
    inside = folder if folder.is_dir() else folder.parent
    if not inside.is_dir():
        return []
    return [f"skimp doctor {path.parent}" for path in sorted(inside.glob(f"*/{RUN}"))[:3]]
