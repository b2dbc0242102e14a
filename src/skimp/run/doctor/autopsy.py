"""`skimp doctor RUN`: what happened, what is kept, what is lost, what to change, how to go on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.run.doctor.advice import Change, advise
from skimp.run.doctor.remains import Remains, gather
from skimp.run.doctor.software import child
from skimp.run.doctor.verdict import Verdict, judge

#: For reading one checkpoint whole; a hundred GB at 50 MB a second.
SOUND_SECONDS = 2000


@dataclass(frozen=True)
class Autopsy:
    """seen: the folder; verdict: what happened; changes: before the next attempt; command: to go on with; sound: what
    is wrong with the newest checkpoint's bytes, empty when they were read and are right, None when not read."""

    seen: Remains
    verdict: Verdict
    changes: tuple[Change, ...]
    command: str
    sound: str | None = None

    def kept(self) -> list[str]:
        """What is safe and what is lost, in sentences."""
        seen, found = self.seen, []
        if seen.newest is not None:
            found.append(
                f"step {seen.newest_step}: {seen.newest} ({format_bytes(seen.newest_bytes)}), {self._complete()}"
            )
        elif seen.step or not self.verdict.well:
            found.append("no complete checkpoint")
        lost = seen.metrics.after
        if lost and self.verdict.kind not in ("running", "elsewhere", "paused", "stuck"):
            steps = f"steps {seen.newest_step + 1} to {seen.metrics.step}" if lost > 1 else f"step {seen.metrics.step}"
            found.append(f"lost: {steps}, {format_seconds(seen.metrics.after_seconds)} of work")
        found += [f"{sentence}; it is passed over, and cleared away on resume" for sentence in seen.broken]
        if seen.metrics.torn:
            found.append("the last line of metrics.jsonl is cut; a resume mends it")
        return found + [f"damaged: {sentence}" for sentence in seen.damaged]

    def _complete(self) -> str:
        if self.sound is None:
            return "complete"
        if not self.sound:
            return "complete, and every byte as it was written"
        return f"DAMAGED ({self.sound}): --resume sets it aside and goes on from the one before"

    def as_dict(self) -> dict[str, Any]:
        """The stable JSON of `skimp doctor RUN --json`."""
        seen, vitals = self.seen, self.seen.vitals
        return {
            "folder": str(seen.folder),
            "verdict": self.verdict.kind,
            "well": self.verdict.well,
            "sure": self.verdict.sure,
            "headline": self.verdict.headline,
            "evidence": list(self.verdict.evidence),
            "step": seen.step,
            "steps": seen.steps,
            "loss": seen.metrics.loss,
            "checkpoint": str(seen.newest) if seen.newest else None,
            "checkpoint_step": seen.newest_step if seen.newest else None,
            "checkpoint_sound": None if self.sound is None else not self.sound,
            "lost_steps": seen.metrics.after,
            "lost_seconds": seen.metrics.after_seconds,
            "broken": list(seen.broken),
            "memory": {key: vitals.get(key) for key in ("rss", "peak", "left", "planned", "budget")},
            "oom_kills_since": seen.oom_kills_since,
            "disk_free_bytes": seen.disk_free,
            "changes": [{"what": c.what, "why": c.why} for c in self.changes],
            "command": self.command,
        }


def autopsy(folder: Path, check: bool = False) -> Autopsy:
    """Examine a run's folder; nothing in it is changed.

    Args:
        folder: the run's.
        check: also read the newest checkpoint against its checksums, in a process of its own.

    Raises:
        CheckpointError: no such folder, or no run in it.
    """
    seen = gather(folder)
    verdict = judge(seen)
    changes, command = advise(seen, verdict)
    sound = None
    if check and seen.newest is not None:
        told = child([sys.executable, "-m", "skimp.run.doctor.sound", str(seen.newest)], SOUND_SECONDS)
        sound = told.get("crash", told.get("wrong", ""))
    return Autopsy(seen, verdict, tuple(changes), command, sound)
