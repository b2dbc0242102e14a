"""`skimp doctor SNAPSHOT.pickle`: what a CUDA memory snapshot shows, on the screen or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from skimp.core.units import format_bytes

if TYPE_CHECKING:
    from skimp.run.doctor.snapshot_plan import Compared
    from skimp.run.doctor.snapshot_replay import DeviceReport


def examine(path: Path, plan: Path | None, as_json: bool) -> bool:
    """Read, replay and show; whether no request failed.

    Raises:
        SkimpError: no snapshot, or no plan to hold it against.
    """
    from skimp.cli.console import console
    from skimp.run.doctor.snapshot import read_snapshot
    from skimp.run.doctor.snapshot_plan import against
    from skimp.run.doctor.snapshot_replay import report

    snapshot = read_snapshot(path)
    reports = report(snapshot)
    compared = against(plan, reports) if plan is not None else None
    if as_json:
        said = {"settings": snapshot.settings.describe(), "devices": [r.as_dict() for r in reports]}
        print(json.dumps(said | ({"plan": compared.as_dict()} if compared else {}), indent=2, ensure_ascii=False))
    else:
        screen = console()
        screen.print(Text(f"{path}: {len(reports)} device(s), allocator: {snapshot.settings.describe()}", "bold"))
        for found in reports:
            show(found, screen)
        if compared is not None:
            _beside(compared, screen)
    return not any(r.ooms for r in reports)


def show(found: DeviceReport, screen: Console) -> None:
    """One device."""
    from skimp.cli.console import grid

    screen.print(Text(f"device {found.device}, {found.events:,} events", "bold"))
    fixed, grown = found.fixed, found.expandable
    segments = [f"{fixed[0]} segments, {format_bytes(fixed[1])}"] if fixed[0] else []
    segments += [f"{grown[0]} expandable, {format_bytes(grown[1])}"] if grown[0] else []
    rows: list[tuple[str, str]] = [
        ("reserved", f"{', '.join(segments) or 'nothing'}; at most {format_bytes(found.reserved.peak)} in the history"),
        (
            "allocated",
            f"{format_bytes(found.allocated)}, {format_bytes(found.fragmentation)} of the reserved in pieces",
        ),
        ("requested", f"at most {format_bytes(found.requested.peak)} in the history"),
    ]
    if found.events:
        near = f"{found.agreed:.0%} of the blocks at the very addresses"
        start = "from the process's start" if found.whole else "from a ring that begins later: near, not exact"
        rows.append(
            (
                "model",
                f"allocated {format_bytes(found.modelled_allocated)}, reserved "
                f"{format_bytes(found.modelled_reserved)}; {near}; history {start}",
            )
        )
    if found.cached:
        rows.append(("largest free", ", ".join(format_bytes(size) for size in found.cached)))
    for size, free in found.ooms:
        rows.append(("out of memory", f"{format_bytes(size)} asked for, {format_bytes(free)} free on the device"))
    table = grid(screen.width, max(len(name) for name, _ in rows), mark=False)
    for name, text in rows:
        table.add_row(Text(name), Text(text, "red" if name == "out of memory" else ""))
    screen.print(table)
    if found.peak:
        screen.print("largest at the fullest moment")
        table = grid(screen.width, 10, mark=False)
        for held in found.peak:
            table.add_row(Text(format_bytes(held.size)), Text("\n".join(held.frames) or "no frames recorded"))
        screen.print(table)


def _beside(compared: Compared, screen: Console) -> None:
    low = compared.error < 0
    screen.print(
        Text.assemble(
            ("the plan: ", "bold"),
            f"{format_bytes(compared.planned_reserved)} reserved, recorded {format_bytes(compared.reserved)}: ",
            (f"{compared.error:+.1%}", "bold red" if low else "green"),
            f"; tensors {format_bytes(compared.planned_requested)} against {format_bytes(compared.requested)}",
        ),
        soft_wrap=True,
    )
