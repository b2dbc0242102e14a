"""What to change before the next attempt, in bytes, and the command that goes on."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.run.doctor.remains import Remains
from skimp.run.doctor.verdict import Verdict

#: A checkpoint this often loses at most so much work, where the disk and the steps allow.
SAVE_SECONDS = 600.0
#: Left free beside the run when a budget is proposed: the kernel's own needs and what other programs do meanwhile.
RESERVE = (100_000_000, 0.03)


#: What a disk refuses for other reasons than being full.
SPECIAL = {
    errno.EFBIG: ("ulimit -f unlimited", "a limit on the size of one file, not the disk, stopped it"),
    errno.EDQUOT: ("a larger quota, or another disk", "the disk has room, but not for this user"),
    errno.EROFS: ("mount -o remount,rw", "the disk is mounted read-only: a failing disk is often put so by the system"),
    errno.EIO: ("another disk", "it reads or writes no more: look at the system's log before trusting it again"),
}


@dataclass(frozen=True)
class Change:
    """what: an override or an action; why: with bytes; override: goes into the command that continues."""

    what: str
    why: str
    override: bool = False


def advise(seen: Remains, verdict: Verdict) -> tuple[list[Change], str]:
    """What to change and the command to go on with; empty where nothing is to be done."""
    if verdict.kind in ("running", "elsewhere"):
        return [], ""
    if verdict.kind == "paused":
        return [], f"kill -CONT {seen.vitals['pid']}"
    if verdict.kind == "stuck":
        return [
            Change("wait", "a step may swap, or its disk may hang; `top` and `iostat` tell"),
            Change(f"kill -TERM {seen.vitals['pid']}", "then it saves at the end of its step and stops"),
        ], ""
    changes = list(_changes(seen, verdict))
    return changes, _command(seen, verdict, changes)


def _changes(seen: Remains, verdict: Verdict) -> Iterator[Change]:
    if verdict.kind in ("killed for memory", "memory refused"):
        yield from _less_memory(seen)
    elif verdict.kind == "disk":
        yield from _more_disk(seen)
    elif verdict.kind == "crashed":
        yield Change("skimp doctor --check", "compares the native kernels with their references on this CPU")
        yield Change("exact.kernels=plain", "runs without the native layers; equal to rounding", override=True)
    elif verdict.kind == "error" or verdict.kind == "not finite":
        for way in seen.vitals["ended"].get("instead", ()):
            yield Change(way, "")
    if not verdict.well:
        yield from _save_more_often(seen)


def _less_memory(seen: Remains) -> Iterator[Change]:
    """A budget that leaves room for what the run took beyond its plan, and for the rest of the machine."""
    v = seen.vitals
    planned, peak = v.get("planned"), v["peak"]
    if planned is None or seen.room is None:
        yield Change("budget=…", f"below what is there; {format_bytes(peak)} were held at most")
        return
    over = max(0, peak - planned)
    free = seen.room - RESERVE[0] - int(RESERVE[1] * seen.room)
    taken = f"it took {format_bytes(over)} more than planned" if over else "it kept to its plan"
    now = f"{format_bytes(seen.room)} are there for a process now ({seen.room_why})"
    if free >= planned + over:
        then = f"all it could have when it died was {format_bytes(v['rss'] + v['left'])}; " if "left" in v else ""
        yield Change("nothing about its memory", f"{taken}; {then}{now}, which is enough while it lasts")
        return
    target = (free - over) // 10**7 * 10**7
    floor = seen.plan.get("places", {}).get("host", {}).get("baseline_bytes", 0)
    if target <= floor:
        yield Change(
            "end other programs, or take a larger machine", f"{now}, and the process alone takes {format_bytes(floor)}"
        )
        return
    yield Change(f"budget={target // 10**6}MB", f"{taken}; {now}; some are kept free", override=True)
    yield from _smaller_ways(seen, target)


def _smaller_ways(seen: Remains, target: int) -> Iterator[Change]:
    """Where the plan of the run knows that no exact way is that small, its offers."""
    ways = seen.plan.get("alternatives", [])
    exact = [w["peak_bytes"] for w in ways if w["exact"]] + [seen.plan.get("peak_bytes", 0)]
    if min(exact) <= target:
        return
    for way in ways:
        if not way["exact"] and way["peak_bytes"] <= target:
            yield Change(
                " ".join(way["overrides"]),
                f"{way['label']}: {format_bytes(way['peak_bytes'])}; it changes the mathematics, so it is a new run",
            )


def _more_disk(seen: Remains) -> Iterator[Change]:
    number = seen.vitals["ended"].get("errno")
    if number in SPECIAL:
        yield Change(*SPECIAL[number])
        return
    need = seen.plan.get("places", {}).get("disk", {}).get("peak_bytes")
    size = f"a checkpoint takes {format_bytes(seen.newest_bytes)}; " if seen.newest_bytes else ""
    if need:
        size += f"the run keeps {format_bytes(need)} at most; "
    yield Change("free space there", f"{size}{format_bytes(seen.disk_free)} are free now")
    if _checkpoint(seen).get("keep", 2) > 1:
        yield Change("checkpoint.keep=1", "the oldest goes as soon as the next is complete", override=True)
    yield Change(f"mv {seen.folder} /a/larger/disk/", "a run may move; resume it where it is then")


def _save_more_often(seen: Remains) -> Iterator[Change]:
    """When a death cost more than a checkpoint every ten minutes would."""
    seconds, lost = seen.metrics.seconds, seen.metrics.after_seconds
    every = _checkpoint(seen).get("every")
    if not seconds or lost < 1 or (every is not None and every * seconds <= SAVE_SECONDS):
        return
    better = _round_down(max(1, int(SAVE_SECONDS / seconds)))
    if seen.steps:
        better = max(1, min(better, _round_down(seen.steps // 2)))
    if every is not None and better >= every:
        return
    need = seen.newest_bytes or seen.plan.get("places", {}).get("disk", {}).get("peak_bytes", 0)
    size = f", each at most {format_bytes(need)}" if need else ""
    yield Change(
        f"checkpoint.every={better}",
        f"a death then loses at most {format_seconds(better * seconds)} of work{size}",
        override=True,
    )


def _round_down(count: int) -> int:
    """To one significant digit: 1, 2, … 9, 10, 20, …"""
    unit = 10 ** int(math.log10(count)) if count > 0 else 1
    return max(1, count // unit * unit)


def _command(seen: Remains, verdict: Verdict, changes: list[Change]) -> str:
    overrides = " ".join(c.what for c in changes if c.override)
    tail = f" {overrides}" if overrides else ""
    if verdict.kind == "finished":
        return f"skimp train {seen.folder} --resume train.steps={2 * seen.step}" if seen.newest and seen.step else ""
    if seen.newest is not None:
        if verdict.kind == "not finite":
            return f"skimp train {seen.folder}/recipe.json output={seen.folder}-again train.lr={_half_rate(seen)}{tail}"
        return f"skimp train {seen.folder} --resume{tail}"
    if not seen.recipe:
        return "the command it was started with: nothing was trained, and its folder is free"
    if seen.metrics.step:
        return f"skimp train {seen.folder}/recipe.json output={seen.folder}-again{tail}"
    return f"skimp train {seen.folder}/recipe.json{tail}"


def _half_rate(seen: Remains) -> str:
    return f"{seen.recipe.get('train', {}).get('lr', 2e-5) / 2:.3g}"


def _checkpoint(seen: Remains) -> dict[str, Any]:
    found = seen.recipe.get("checkpoint")
    return found if isinstance(found, dict) else {}
