"""What happened to a run: one word, a sentence, and the evidence, each with its figures."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.run.doctor.remains import Remains
from skimp.run.vitals import STALE_SECONDS, boot_id

#: An errno that means the disk and not the program.
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
#: Words of allocators that were refused memory: c10's on the CPU, CUDA's, Python's own.
REFUSED = re.compile(r"can't allocate memory|out of memory|not enough memory|cannot allocate|OutOfMemory", re.I)
#: Below this share of what the process held, what the machine had left counts as nothing.
SCARCE = 0.08


@dataclass(frozen=True)
class Verdict:
    """kind: a stable word (`KINDS`); headline: what happened, in a few words; sure: False where it is inferred from
    circumstances; evidence: sentences."""

    kind: str
    headline: str
    sure: bool
    evidence: tuple[str, ...]

    @property
    def well(self) -> bool:
        return KINDS[self.kind]


#: Every verdict, and whether all is well with it.
KINDS = {
    "finished": True,
    "stopped": True,
    "running": True,
    "elsewhere": True,
    "paused": False,
    "stuck": False,
    "interrupted": False,
    "not finite": False,
    "disk": False,
    "memory refused": False,
    "killed for memory": False,
    "killed": False,
    "machine restarted": False,
    "crashed": False,
    "error": False,
    "unknown": False,
}


def judge(seen: Remains) -> Verdict:
    """The verdict on what `gather` found."""
    if seen.life in ("running", "paused", "elsewhere"):
        return _living(seen)
    ended = seen.vitals.get("ended")
    if ended:
        return _in_its_own_words(seen, ended)
    if not seen.vitals:
        return _without_vitals(seen)
    when = (_last_sign(seen), *_growth(seen), *_survived(seen))
    if seen.crash:
        name = re.search(r"Fatal Python error: (.*)", seen.crash)
        return Verdict(
            "crashed", f"crashed: {name.group(1) if name else 'a fatal signal'}", True, (*when, *_stack(seen))
        )
    if seen.vitals.get("boot") != boot_id():
        return Verdict("machine restarted", "the machine went down or restarted under it", True, when)
    return _without_a_word(seen, when)


def _living(seen: Remains) -> Verdict:
    v = seen.vitals
    if not v:
        return Verdict("running", "running: a process holds its lock", True, ())
    doing = f"process {v['pid']} is in phase '{v['phase']}', {_steps(v.get('step') or 0)}; {_memory(v)}"
    silent = seen.now - v["time"]
    if seen.life == "elsewhere":
        return Verdict(
            "elsewhere",
            f"begun on another machine, {v['host']}: ask there whether it runs",
            False,
            (f"its last sign of life was {format_seconds(silent)} ago: {doing}",),
        )
    if seen.life == "paused":
        return Verdict("paused", f"paused: process {v['pid']} was stopped (Ctrl-Z or SIGSTOP)", True, (doing,))
    if silent > 6 * STALE_SECONDS:
        why = "it waits for the disk (state D)" if seen.state == "D" else f"its state is {seen.state or 'not told'}"
        return Verdict(
            "stuck", "alive, and gives no sign of life", False, (doing, f"silent for {format_seconds(silent)}; {why}")
        )
    return Verdict("running", "running", True, (doing,))


def _in_its_own_words(seen: Remains, ended: dict[str, Any]) -> Verdict:
    how = ended["how"]
    took = format_seconds(ended["time"] - seen.vitals["started"])
    if how in ("finished", "early stop"):
        said = {"finished": "finished", "early stop": "finished early: the held-out loss no longer fell"}[how]
        return Verdict("finished", said, True, (f"the session took {took}",))
    if how != "error":
        return Verdict("stopped", f"stopped as asked ({how}), and saved first", True, (f"the session took {took}",))
    kind, said = ended["kind"], str(ended.get("message", ""))
    where = f"after {took}, in phase '{seen.vitals['phase']}', {_steps(seen.step)}"
    evidence = [where, *_said(ended)]
    if kind == "KeyboardInterrupt":
        return Verdict("interrupted", "interrupted at once, by Ctrl-C", True, (where,))
    if kind == "NonFiniteError":
        return Verdict("not finite", "stopped itself: the loss or a gradient went wrong", True, tuple(evidence))
    if ended.get("errno") in DISK:
        return Verdict("disk", "the disk took no more", True, (*evidence, _disk(seen)))
    if kind == "OutOfMemory":
        short = "memory ran short, nothing smaller would do, and it saved first"
        return Verdict("memory refused", short, True, (*evidence, *_survived(seen), _memory(seen.vitals)))
    if kind in ("MemoryError", "OutOfMemoryError") or REFUSED.search(said):
        return Verdict("memory refused", "memory was asked for and refused", True, (*evidence, _memory(seen.vitals)))
    evidence += ended.get("where", ())
    return Verdict("error", f"ended with an error: {kind}", True, tuple(evidence))


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'} done"


def _said(ended: dict[str, Any]) -> list[str]:
    """The error's own words, without its advice, which stands under what to change."""
    if "asked" not in ended:
        return [line for line in str(ended.get("message", "")).splitlines() if line.strip()]
    found = f"{ended['asked']}: {ended['found']}" if ended["found"] else ended["asked"]
    return [found, *([f"because {ended['why']}"] if ended["why"] else [])]


def _without_vitals(seen: Remains) -> Verdict:
    """A folder of an older skimp, or one whose disk took not even the first page."""
    stopped = seen.summary.get("stopped")
    if stopped and seen.summary.get("steps", 0) >= seen.metrics.step:
        done = stopped in ("finished", "early stop")
        return Verdict(
            "finished" if done else "stopped", stopped if done else f"stopped as asked ({stopped})", True, ()
        )
    if seen.life == "unknown":
        return Verdict("unknown", "no sign of life, and this system does not tell who holds the lock", False, ())
    return Verdict(
        "killed", "ended without a word", False, ("there is no vitals.json: when and in which phase is not known",)
    )


def _without_a_word(seen: Remains, when: tuple[str, ...]) -> Verdict:
    """SIGKILL leaves nothing. Who sent it is inferred: the kernel's log, its count of such kills, what was left."""
    v, kernel = seen.vitals, _kernel_log(seen.vitals["pid"])
    kills, limit = seen.oom_kills_since, v["rss"] + v.get("left", 0)
    scarce = "left" in v and v["left"] < max(SCARCE * v["rss"], 64_000_000)
    evidence = [*when]
    if "left" in v:
        evidence.append(f"the system had {format_bytes(v['left'])} left for it then ({v['left_why']})")
    if kills:
        evidence.append(
            f"since it began, the kernel has killed {kills} process{'es' if kills > 1 else ''} for want of memory"
        )
    if kernel:
        return Verdict("killed for memory", "killed by the kernel, for want of memory", True, (*evidence, kernel))
    if kills or scarce:
        how = "very likely" if kills and scarce else "likely"
        return Verdict("killed for memory", f"killed, {how} by the kernel for want of memory", False, tuple(evidence))
    evidence.append(
        f"memory was not scarce ({format_bytes(v['rss'])} held of {format_bytes(limit)}), so this was kill -9, a job "
        "manager's limit, the end of a container, or SIGTERM before the first step"
        if "left" in v
        else "how much memory was left is not known on this system"
    )
    return Verdict("killed", "killed from outside, with no time for a word", False, tuple(evidence))


def _last_sign(seen: Remains) -> str:
    v = seen.vitals
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v["time"]))
    lived = format_seconds(max(0.0, v["time"] - v["started"]))
    phase = f"step {seen.step + 1}{f' of {seen.steps}' if seen.steps else ''}" if v["phase"] == "train" else v["phase"]
    return f"its last sign of life was at {at}, {lived} after it began, in {phase}; {_memory(v)}"


def _memory(v: dict[str, Any]) -> str:
    text = f"it held {format_bytes(v['rss'])}, at most {format_bytes(v['peak'])}"
    if v.get("planned"):
        text += f"; planned {format_bytes(v['planned'])}"
    if v.get("budget"):
        text += f" of a budget of {format_bytes(v['budget'])}"
    return text


def _growth(seen: Remains) -> tuple[str, ...]:
    """Memory that rises from step to step is a leak, not a peak."""
    early, late, step = seen.metrics.early, seen.metrics.memory, seen.metrics.step
    if early and late and late > 1.15 * early and step > 10:
        return (f"memory grew from {format_bytes(early)} after step 3 to {format_bytes(late)} after step {step}",)
    return ()


def _survived(seen: Remains) -> tuple[str, ...]:
    """What the run had gone on after: retries and smaller plans, as it noted them."""
    return tuple(f"before that, {note}" for note in seen.metrics.notes)


def _disk(seen: Remains) -> str:
    return f"{format_bytes(seen.disk_free)} are free there now"


def _stack(seen: Remains) -> tuple[str, ...]:
    return tuple(line for line in seen.crash.splitlines()[:8] if line.strip())


def _kernel_log(pid: int) -> str:
    """The kernel's own line about this process, where one may read its log."""
    if shutil.which("dmesg") is None:
        return ""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line for line in done.stdout.splitlines() if re.search(rf"[Kk]illed process {pid}\b", line)]
    return f"the kernel's log says: {lines[-1].strip()}" if lines else ""
