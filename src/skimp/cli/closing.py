"""The closing table of a run: planned against measured, loss before and after, where everything is."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skimp.core.units import format_bytes, format_seconds

WORDS = {
    "finished": "finished",
    "early stop": "stopped early, the held-out loss no longer falls,",
    "SIGINT": "stopped by Ctrl-C at a step boundary",
    "SIGTERM": "stopped by SIGTERM at a step boundary",
}


def print_closing(outcome: Any, console: Console) -> None:
    """Print summary.json for a person; after a signal, the command that goes on."""
    s = outcome.summary
    console.print()
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold")
    for column in ("planned against measured", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if column.startswith("planned ") else "right", no_wrap=True)
    _bytes(table, "tensors at the peak", s["planned_peak_bytes"], s["measured_peak_bytes"])
    _bytes(table, "whole process at the peak", s["planned_rss_bytes"], s["rss_peak_bytes"])
    planned, measured = s["plan"]["predicted_step_seconds"], s["seconds_per_step"]
    if measured:
        table.add_row("seconds a step", f"{planned:.3g}", f"{measured:.3g}", f"{measured / planned - 1:+.0%}")
        table.add_row("tokens a second", "", f"{s['tokens_per_second']:,.1f}", "")
    console.print(table)
    if s["loss_first"] is not None:
        console.print(f"training loss {s['loss_first']:.4f} → {s['loss_last']:.4f} over {s['steps']} steps")
    before, after = s["eval_loss_before"], s["eval_loss_after"]
    if before is not None and after is not None:
        console.print(f"held-out loss {before:.4f} → {after:.4f}")
    if s.get("away"):
        console.print(away_words(s["away"]))
    for event in s.get("survived", ()):  # absent from an older skimp's
        console.print(Text(f"survived at {event}"), soft_wrap=True)
    how = WORDS.get(outcome.stopped, outcome.stopped)
    end = f"{how} after {format_seconds(s['wall_seconds'])}; everything is in {outcome.folder}"
    console.print(Text(end), soft_wrap=True)
    if outcome.stopped in ("SIGINT", "SIGTERM"):
        console.print(Text(f"continue with:\n  skimp train {outcome.folder} --resume"), soft_wrap=True)


def away_words(away: dict[str, Any]) -> str:
    """What activations moved to the place they waited in and back, and how much of that cost no time of its own."""
    bytes_moved = f"{format_bytes(int(away['out']))} out, {format_bytes(int(away['back']))} back"
    if away["hidden"] is None:
        return f"activations that waited elsewhere: {bytes_moved}"
    moving, waited = format_seconds(away["moving"]), format_seconds(away["waited"])
    return (
        f"activations that waited on disk: {bytes_moved}; {moving} of copying, of which the computation waited for "
        f"{waited}: {away['hidden']:.0%} hidden"
    )


def print_trial(plan: Any, trial: Any, console: Console) -> None:
    """What `skimp plan --probe` measured, beside the plan."""
    console.print()
    table = Table(box=None, pad_edge=False)
    for column in ("probe: two real steps", "planned", "measured", "difference"):
        table.add_column(column, justify="left" if column.startswith("probe") else "right", no_wrap=True)
    _bytes(table, "tensors at the peak", plan.profile.phases["train"], trial.tensors)
    _bytes(table, "whole process at the peak", trial.expected, trial.process)
    ratio = trial.seconds / plan.seconds
    table.add_row("seconds a step", f"{plan.seconds:.3g}", f"{trial.seconds:.3g}", f"{ratio - 1:+.0%}")
    console.print(table)
    if trial.above:
        more = format_bytes(trial.above)
        console.print(
            Text(f"it took {more} more than planned: the plan above was made again with that"), soft_wrap=True
        )
    console.print(Text(trial.said or "remembered: the next plans on this machine reckon with it"), soft_wrap=True)


def _bytes(table: Table, name: str, planned: int | None, measured: int | None) -> None:
    if planned and measured:
        table.add_row(name, format_bytes(planned), format_bytes(measured), f"{measured / planned - 1:+.1%}")
    elif planned:
        table.add_row(name, format_bytes(planned), "not measured", "")
