"""A disk that fills or fails under what waits on it: what happened, and what to say when nothing does without it.

Nothing that was learned is on that disk: activations are of the step that broke off, and are made again. Full is told
from failing: of a full disk a plan may still use what it had, a failing one it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skimp.core.errors import DamagedOffload, OffloadError
from skimp.core.tiers import PlaceError
from skimp.core.units import format_bytes
from skimp.run.offloaded import held

if TYPE_CHECKING:
    from skimp.run.build import Run


@dataclass(frozen=True)
class DiskFault:
    """What happened in words, and the bytes that a plan may still count on there: 0 of a disk that fails."""

    story: str
    room: int

    @classmethod
    def of(cls, error: BaseException, run: Run) -> DiskFault | None:
        """The fault behind an exception of a step; None for any other error, a checkpoint's among them."""
        if isinstance(error, DamagedOffload):
            return cls(f"{error.asked}: {error.found}", 0)
        if not isinstance(error, PlaceError) or run.offload is None:
            return None
        tier = run.offload.tier
        room = held(run).get("disk", 0) if error.full else 0
        had = f"with {format_bytes(tier.size)} of activations there" if error.full else "the disk cannot be relied on"
        return cls(f"{error.filename}: {error.strerror}, {had}", room)


def give_back_disk(run: Run) -> None:
    """The blocks are plain again and the tier's room is free: a checkpoint may need it."""
    if run.offload is not None:
        run.offload.remove()
        run.offload = None


def stopped_by_disk(step: int, story: str, why: str, fault: DiskFault, kept: Path | None, folder: Path) -> OffloadError:
    """The error that ends a run which cannot do without the disk that failed.

    Args:
        step: the optimizer step that broke off, from 1.
        kept: the newest checkpoint.
        folder: the run's.
    """
    free = ["free space there"] if fault.room else []
    return OffloadError(
        f"optimizer step {step} with activations on disk",
        story,
        why,
        [
            f"everything until {kept.name} is saved; continue: skimp train {folder} --resume"
            if kept
            else "nothing was learned yet; start again",
            *free,
            "exact.offload.folder=… on another disk",
            "a larger budget with exact.offload.activations=none; skimp plan lists what fits in how many bytes",
        ],
    )
