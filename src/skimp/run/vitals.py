"""Signs of life of a session, so that `skimp doctor RUN` can say afterwards what a dead one died of.

`vitals.json` in the run's folder says who runs, since when, in which phase and step, how much memory the process held
and how much the machine had left; at an end with words, also why. What leaves no words (SIGKILL, the kernel's
out-of-memory killer, a power cut) is recognised by their absence.

The file is one page, written in place through a descriptor that stays open: a beat is one write of 4 KiB, and it
works when the disk is full, which is when it is wanted. A reader that catches half of a write reads again (`read`).
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from skimp.core.errors import SkimpError
from skimp.core.memory.process import resident
from skimp.recipe.host import host_budget

VITALS, CRASH = "vitals.json", "crash.txt"
PAGE = 4096
#: Between two samples of memory inside a long step. Twice a second of some 0.2 ms each: 0.04 % of one core.
PULSE_SECONDS = 0.5
#: Written at least this often, so that a process that hangs differs from one that is gone.
STALE_SECONDS = 5.0


class Vitals:
    """Of one session in one folder. Every method may be called from any thread, and none of them ever raises for
    want of disk: a run must not die of its own diary.

    Args:
        folder: the run's folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = {}
        self._descriptor: int | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._written_at, self._written_rss = 0.0, 0

    @contextmanager
    def session(self) -> Iterator[Vitals]:
        """From the claim of the folder to its end; an exception that leaves is noted and goes on."""
        self._begin()
        pulse = threading.Thread(target=self._pulse, name="skimp-vitals", daemon=True)
        pulse.start()
        try:
            with _crash_notes(self.folder / CRASH):
                yield self
        except BaseException as error:
            self.died(error)
            raise
        finally:
            self._over.set()
            pulse.join()
            with self._lock:
                if self._descriptor is not None:
                    os.close(self._descriptor)
                    self._descriptor = None

    def beat(self, phase: str, step: int | None = None, **facts: Any) -> None:
        """Say what is going on now.

        Args:
            phase: "prepare", "plan", "load", "train", "evaluate", "sample", "save", "rebuild" …
            step: optimizer steps completed; None leaves it as it was.
            facts: more plain values to keep, such as `budget=2_000_000_000`.
        """
        with self._lock:
            self.record.update(facts, phase=phase)
            if step is not None:
                self.record["step"] = step
            self._sample(room=False)
            self._write()

    def died(self, error: BaseException) -> None:
        """The exception that ends the session, in its own words, and the memory at that moment."""
        how: dict[str, Any] = {"how": "error", "kind": type(error).__name__, "message": str(error)}
        if isinstance(error, SkimpError):
            how |= {"asked": error.asked, "found": error.found, "why": error.why, "instead": error.instead}
        else:
            how["where"] = [line.rstrip() for line in traceback.format_tb(error.__traceback__)[-4:]]
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno is not None:
                how["errno"] = cause.errno
            cause = cause.__cause__
        self._end(how)

    def ended(self, stopped: str) -> None:
        """An end as meant: "finished", "early stop", or the name of the signal after which it saved and stopped."""
        self._end({"how": stopped})

    def _end(self, how: dict[str, Any]) -> None:
        with self._lock:
            self._sample(room=True)
            self.record["ended"] = how | {"time": time.time()}
            self._write()
            self._over.set()

    def _begin(self) -> None:
        with suppress(OSError):
            (self.folder / CRASH).unlink()
        self.record = {
            "pid": os.getpid(),
            "born": process_birth(os.getpid()),
            "host": platform.node(),
            "boot": boot_id(),
            "started": time.time(),
            "oom_kills": oom_kills(),
            "phase": "prepare",
            "step": None,
        }
        with suppress(OSError):  # a full disk is the run's own matter, and it says so
            self._descriptor = os.open(self.folder / VITALS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with self._lock:
            self._sample(room=True)
            self._write()

    def _pulse(self) -> None:
        while not self._over.wait(PULSE_SECONDS):
            with self._lock:
                if self._over.is_set():
                    return
                self._sample(room=True)
                grown = self.record["rss"] > 1.02 * self._written_rss
                if grown or time.monotonic() - self._written_at > STALE_SECONDS:
                    self._write()

    def _sample(self, room: bool) -> None:
        memory = resident()
        self.record.update(time=time.time(), rss=memory.now, peak=memory.peak)
        if room:
            with suppress(SkimpError):  # the system does not tell: the figure is left out
                most = host_budget()
                self.record.update(left=max(0, most.bytes - memory.now), left_why=most.why)

    def _write(self) -> None:
        if self._descriptor is None:
            return
        with suppress(OSError):
            os.pwrite(self._descriptor, _page(self.record), 0)
        self._written_at, self._written_rss = time.monotonic(), self.record["rss"]


def _page(record: Mapping[str, Any]) -> bytes:
    """The record as JSON, padded to one page; long words of an error are cut to fit."""
    room = PAGE
    while True:
        text = json.dumps(record, ensure_ascii=False).encode()
        if len(text) < PAGE:
            return text.ljust(PAGE - 1) + b"\n"
        room //= 2
        record = _cut(record, room)


def _cut(value: Any, length: int) -> Any:
    if isinstance(value, str) and len(value) > length:
        return value[: max(length - 1, 0)] + "…"
    if isinstance(value, Mapping):
        return {key: _cut(inner, length) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, length) for inner in value[: max(length // 64, 1)]]
    return value


def read(folder: Path) -> dict[str, Any] | None:
    """The last record in a run's folder; None where there is none that can be read."""
    for _ in range(5):
        try:
            found = json.loads((folder / VITALS).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            time.sleep(0.01)  # half of a write; a later look sees a whole one
            continue
        return found if isinstance(found, dict) else None
    return None


@contextmanager
def _crash_notes(path: Path) -> Iterator[None]:
    """Let Python write the stack to `path` on a segmentation fault and its like; not where somebody listens already."""
    if faulthandler.is_enabled():
        yield
        return
    file: IO[str] | None = None
    with suppress(OSError):
        file = path.open("w", encoding="utf-8")
    if file is None:
        yield
        return
    faulthandler.enable(file)
    try:
        yield
    finally:
        faulthandler.disable()
        file.close()
        with suppress(OSError):
            path.unlink()


def process_birth(pid: int) -> int | None:
    """Clock ticks after boot at which a process began: with its number it names one process for ever (Linux)."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def process_state(pid: int) -> str:
    """R, S, D, T (stopped) … as in proc(5); empty when there is no such process or the system does not tell."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may hold spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def boot_id() -> str:
    """Another after each start of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes the kernel has killed for want of memory since boot, on the whole machine; None where not told."""
    try:
        text = (root / "proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)
