"""A plan for a card beside what a memory snapshot recorded there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skimp.core.errors import SkimpError
from skimp.run.doctor.snapshot_replay import DeviceReport


@dataclass(frozen=True)
class Compared:
    """Planned and recorded peaks in bytes, and by how much the plan was above (+) or below the record."""

    planned_requested: int
    planned_reserved: int
    requested: int
    reserved: int

    @property
    def error(self) -> float:
        """Of the reserved peak."""
        return self.planned_reserved / self.reserved - 1

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "planned_requested_bytes": self.planned_requested,
            "planned_reserved_bytes": self.planned_reserved,
            "requested_bytes": self.requested,
            "reserved_bytes": self.reserved,
            "error": self.error,
        }


def against(path: Path, reports: list[DeviceReport]) -> Compared:
    """Hold the fullest device of a snapshot against the plan in a run's folder, or in a file of `skimp plan --json`.

    Raises:
        SkimpError: no plan there, or one for a CPU.
    """
    file = path / "plan.json" if path.is_dir() else path
    try:
        plan = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SkimpError(
            f"a plan at {path}",
            str(error),
            instead=["a run's folder", "skimp plan RECIPE --gpu 24GB --json > plan.json"],
        ) from None
    device = _under(_under(plan, "places"), "device")
    planned = _under(device, "allocator")
    if not all(isinstance(planned.get(k), int) for k in ("requested_bytes", "reserved_bytes")):
        raise SkimpError(
            f"a plan for a card at {path}",
            f"one for {device.get('name', 'nothing')}",
            "it has no reserved bytes to hold a snapshot against",
            "skimp plan RECIPE --gpu 24GB --json > plan.json",
        )
    fullest = max(reports, key=lambda r: r.reserved.peak, default=None)
    if fullest is None or not fullest.reserved.peak:
        raise SkimpError("a snapshot with something in it", "nothing was reserved on any device")
    return Compared(
        planned["requested_bytes"], planned["reserved_bytes"], fullest.requested.peak, fullest.reserved.peak
    )


def _under(value: Any, key: str) -> dict[str, Any]:
    """The object at a key; an empty one where there is none."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}
