"""A run's output folder: one run, one process at a time, nothing of anybody else's overwritten.

run.json        who owns the folder: the fingerprint of the recipe; written when the folder is claimed
.lock           locked (flock) while a process runs here; the lock dies with the process, so a stale file is
harmless metrics.jsonl   one object per step, each step once, whatever deaths and resumes lay between
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from skimp.core.errors import CheckpointError
from skimp.core.lock import LOCK
from skimp.run.checkpoint_folder import latest
from skimp.run.durable import write_all, write_json
from skimp.run.vitals import CRASH, VITALS, Vitals

__all__ = ["RunFolder", "append_jsonl", "claim", "truncate_jsonl", "write_json"]

RUN = "run.json"
#: What a session writes before its first step is done: a folder that holds nothing else can be begun anew.
UNBEGUN = (RUN, "recipe.json", "plan.json", "optimizer.json", "evals.jsonl", "timeline.json", VITALS, CRASH)
#: Where files without names are made, unless the recipe names a folder.
OFFLOAD = "offload"
#: Folders of a session; they count only when something is in them.
EMPTY = ("checkpoints", OFFLOAD)


class RunFolder:
    """A claimed folder; the lock is held until `close` (or the end of the process, however it ends).

    Attributes:
        path: the folder.
        run: the content of run.json: `fingerprint`, `schema_version`.
        made: the folder was not there before this claim.
        vitals: signs of life, written once `vitals.session()` is entered.
    """

    def __init__(self, path: Path, run: dict[str, Any], lock: int, made: bool = False) -> None:
        self.path = path
        self.run = run
        self.made = made
        self.vitals = Vitals(path)
        self._lock: int | None = lock

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.path / "evals.jsonl"

    def release(self) -> None:
        """Take back the claim of a run that ended before its first step: a corrected one may begin here.

        Does nothing once there is a step, a checkpoint or any other file.
        """
        if begun(self.path):
            return
        for name in UNBEGUN:
            (self.path / name).unlink(missing_ok=True)
        for name in EMPTY:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rmdir()
        if self.made:
            (self.path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a file of somebody else's came in: the folder stays
                self.path.rmdir()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def claim(output: Path, fingerprint: Mapping[str, Any], resume: bool, *, may_change: Iterable[str] = ()) -> RunFolder:
    """Take a folder for a run, or refuse and touch nothing.

    Args:
        output: made when missing.
        fingerprint: plain values that must be equal when a run goes on (what defines its mathematics and
            data).
        resume: False takes an empty or new folder; True takes one that holds this run.
        may_change: names of recipe keys to mention as free to change, when the fingerprint differs.

    Raises:
        CheckpointError: the folder holds a run (and `resume` is False), files that are no run, or another
            run than this one; nothing to resume; another process runs there; the folder cannot be made or
            written.
    """
    output = Path(output)
    made = not output.exists()
    try:
        _check_content(output, resume)
        output.mkdir(parents=True, exist_ok=True)
        lock = _lock(output)
        try:
            _check_content(output, resume)  # again: another process may have claimed it meanwhile
            fingerprint = json.loads(json.dumps(fingerprint))  # as it will be read back: tuples become lists
            if resume:
                run = _read_run(output)
                _check_same(output, run.get("fingerprint", {}), fingerprint, may_change)
            else:
                run = {"schema_version": 1, "fingerprint": fingerprint}
                write_json(output / RUN, run)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise CheckpointError(
            f"output folder {output}",
            f"{error.strerror or error}",
            "a run writes there",
            "name another output",
        ) from error
    return RunFolder(output, run, lock, made)


def begun(output: Path) -> bool:
    """Whether a folder holds more than what a session writes before its first step."""
    for path in output.iterdir():
        if path.name in (*UNBEGUN, LOCK) or ".tmp-" in path.name:
            continue
        if path.is_dir() and path.name in EMPTY and not any(path.iterdir()):
            continue
        return True
    return False


def _check_content(output: Path, resume: bool) -> None:
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"output folder {output}", "a file of that name", instead="name another output")
    names = sorted(path.name for path in output.iterdir()) if output.exists() else []
    names = [name for name in names if name != LOCK and not name.startswith(f"{RUN}.tmp-")]
    if RUN in names:
        if not resume and begun(output):
            going_on = "continue that run: --resume"
            if latest(output / "checkpoints") is None:
                going_on = f"it has no complete checkpoint to go on from: remove {output} if you do not need it"
            raise CheckpointError(
                f"a new run in {output}",
                f"another run's folder: {_listed(names)}",
                "its metrics and checkpoints would be mixed or lost",
                [going_on, "name another output folder: output=…"],
            )
    elif names:
        raise CheckpointError(
            f"a run in {output}",
            f"files that are no skimp run (there is no {RUN}): {_listed(names)}",
            "skimp overwrites nothing it did not write",
            ["name a new or empty output folder"],
        )
    elif resume:
        raise CheckpointError(f"resume the run in {output}", "no run there", instead="start it without --resume")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _read_run(output: Path) -> dict[str, Any]:
    try:
        run = json.loads((output / RUN).read_bytes())
        if not isinstance(run["fingerprint"], dict):
            raise TypeError("its fingerprint is no object")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"reading {output / RUN}",
            f"{type(error).__name__}: {error}",
            "it is damaged",
            "name another output folder",
        ) from error
    return dict(run)


def _check_same(output: Path, saved: Mapping[str, Any], now: Mapping[str, Any], may_change: Iterable[str]) -> None:
    absent = object()
    changed = [
        f"{key}: was {_shown(saved, key)}, now {_shown(now, key)}"
        for key in sorted({*saved, *now})
        if saved.get(key, absent) != now.get(key, absent)
    ]
    if changed:
        free = ", ".join(may_change)
        raise CheckpointError(
            f"resume the run in {output} with this recipe",
            "; ".join(changed),
            "it would go on with other mathematics or data than it began with",
            [
                "put these keys back" + (f"; free to change are: {free}" if free else ""),
                "or start a new run in another output folder",
            ],
        )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "absent"


def _lock(output: Path) -> int:
    try:
        import fcntl
    except ImportError as error:
        raise CheckpointError(
            f"running in {output}",
            "a system without file locks (flock)",
            "two processes in one folder would destroy each other's checkpoints",
            "Linux, macOS, or WSL on Windows",
        ) from error
    # Python opens with O_CLOEXEC: child programs do not inherit the lock. A bare fork would, and keep it
    # alive.
    descriptor = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"running in {output}",
            f"process {owner or 'unknown'} is running there",
            "two processes would destroy each other's checkpoints",
            ["wait for it, or stop it", "name another output folder"],
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line, in one write. A full disk may cut it; `truncate_jsonl` mends that on resume."""
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        write_all(descriptor, line)
    finally:
        os.close(descriptor)


def truncate_jsonl(path: Path, last_step: int, key: str = "step") -> int:
    """Cut a file of rising steps after `last_step`, so that a resumed run adds the following ones once.

    Lines are read one at a time and the file is cut in place, which is atomic. A last line without its
    newline is cut too: it is what a death left.

    Args:
        path: may be missing.
        last_step: the step of the checkpoint the run goes on from; its line stays.
        key: where a line keeps its step.

    Returns:
        The number of lines kept.

    Raises:
        CheckpointError: a line that is not an object with an integer step, by its number.
    """
    if not path.exists():
        return 0
    kept, size = 0, 0
    with open(path, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)[key]
                if not isinstance(step, int):
                    raise TypeError(f"{key} is {step!r}")
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path}, line {kept + 1}",
                    f"{type(error).__name__}: {error}",
                    f"each line must be a JSON object with an integer '{key}'",
                    "remove that line, or move the file away",
                ) from error
            if step > last_step:
                break
            kept, size = kept + 1, size + len(line)
        file.truncate(size)
        os.fsync(file.fileno())
    return kept
