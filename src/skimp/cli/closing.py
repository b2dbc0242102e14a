"""The closing table of a run: planned against measured, loss before and after, where everything is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from skimp.core.units import format_bytes, format_seconds


def print_closing(outcome: Any, console: Console) -> None:
    """Print summary.json for a person."""
    s = outcome.summary
    table = Table(box=None, pad_edge=False, title="planned against measured", title_justify="left", title_style="bold")
    for column in ("", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if not column else "right")
    measured = s["measured_peak_bytes"]
    if measured:
        _row(table, "tensors at the peak", s["planned_peak_bytes"], measured)
    if s["planned_rss_bytes"]:
        _row(table, "whole process at the peak", s["planned_rss_bytes"], s["rss_peak_bytes"])
    if s["tokens_per_second"]:
        planned = s["plan"]["predicted_step_seconds"]
        real = s["tokens_per_second"]
        table.add_row("seconds a step", f"{planned:.1f}", f"{s['seconds_per_step']:.1f}",
                      f"{s['seconds_per_step'] / planned - 1:+.0%}")
        table.add_row("tokens a second", "", f"{real:.1f}", "")
    console.print(table)
    if s["loss_first"] is not None:
        console.print(f"loss {s['loss_first']:.4f} → {s['loss_last']:.4f} over {s['steps']} steps")
    if s["eval_loss_before"] is not None and s["eval_loss_after"] is not None:
        console.print(f"held-out loss {s['eval_loss_before']:.4f} → {s['eval_loss_after']:.4f}")
    console.print(f"{s['stopped']} after {format_seconds(s['wall_seconds'])}; everything is in {outcome.folder}")


def _row(table: Table, name: str, planned: int, measured: int) -> None:
    table.add_row(name, format_bytes(planned), format_bytes(measured), f"{measured / planned - 1:+.1%}")
