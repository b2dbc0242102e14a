"""Draw a plan for a terminal: bars of bytes by category against the budget, the choice, its reasons."""

from __future__ import annotations

import shlex
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skimp.core.units import format_bytes, format_seconds

COLOURS = {
    "weights": "blue",
    "adapters": "bright_blue",
    "gradients": "magenta",
    "optimizer": "cyan",
    "activations": "green",
    "logits": "yellow",
    "workspace": "bright_black",
    "batch": "bright_black",
    "baseline": "white",
    "allocator": "bright_black",
}
WIDTH = 40


def print_plan(plan: Any, console: Console) -> None:
    """The whole plan."""
    shares = plan.as_dict()["by_category"]
    budget = plan.places.device_budget
    verdict = Text("fits", "bold green") if plan.fits else Text("does not fit", "bold red")
    what = "whole process" if plan.places.on_cpu else "reserved on the card"
    console.print(
        Text.assemble(
            (plan.model, "bold"),
            f" · {plan.profile.parameters:,} parameters{_trained(plan.profile)} · {plan.places.device}: ",
            verdict,
            f"  {format_bytes(plan.peak_bytes)} of {format_bytes(budget)} ({what})",
        )
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    top = max(budget, plan.peak_bytes)
    for name, size in shares.items():
        if size > 0:
            table.add_row(
                name, format_bytes(size), Text("█" * max(1, round(WIDTH * size / top)), COLOURS.get(name, ""))
            )
    table.add_row("peak", format_bytes(plan.peak_bytes), _budget_bar(plan.peak_bytes, budget, top), style="bold")
    console.print(table)
    console.print(f"at the peak: {plan.profile.peak.where()}")
    others = {k: v for k, v in plan.profile.phases.items() if k != "train"}
    console.print("other phases, tensors: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in others.items()))
    console.print(Text.assemble(("chosen: ", "bold"), plan.exact.describe(plan.blocks, plan.rows)))
    for reason in plan.why:
        console.print(f"  · {reason}")
    console.print(f"predicted: {short(plan.seconds)} a step, {tokens_per_second(plan)} tokens/s ({plan.rates})")
    _earlier(plan, console)
    console.print(f"disk: {_on_disk(plan)} of {format_bytes(plan.places.disk)}")
    if plan.profile.away.get("host"):
        console.print(f"host: {format_bytes(plan.host_bytes)} of {format_bytes(plan.places.host)}, offloaded to it")
    _alternatives(plan, console)
    for note in plan.notes:
        console.print(f"note: {note}", style="bright_black", markup=False)


def _earlier(plan: Any, console: Console) -> None:
    """What earlier runs on this machine say of this plan; nothing where there was none."""
    seen = plan.places.seen
    if seen.errors and plan.places.on_cpu:
        least = seen.least_bytes(plan.peak_bytes, plan.places.baseline)
        console.print(f"by earlier runs here: {format_bytes(least)} to {format_bytes(plan.peak_bytes)} of the process")
    span = seen.seconds(plan.seconds)
    if span is not None and plan.places.on_cpu:
        console.print(f"by earlier runs here: {short(span[0])} to {short(span[1])} a step")
    for sentence in seen.sentences():
        console.print(f"  · {sentence}")


def _on_disk(plan: Any) -> str:
    offloaded, text = plan.profile.away.get("disk", 0), plan.places.text_bytes
    parts = [f"checkpoints {format_bytes(plan.disk_bytes - offloaded - text)}"]
    parts += [f"tokens {format_bytes(text)}"] if text else []
    parts += [f"offloaded {format_bytes(offloaded)}"] if offloaded else []
    return " + ".join(parts)


def _trained(profile: Any) -> str:
    return "" if profile.trained == profile.parameters else f", {profile.trained:,} of them trained"


def short(seconds: float) -> str:
    """As `format_seconds`, and milliseconds below one second: tiny models step in a few of them."""
    return format_seconds(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def tokens_per_second(plan: Any) -> str:
    """The predicted rate; the plan knows its rows and their length through the flops' own batch."""
    return f"{plan.tokens / plan.seconds:,.0f}"


def _budget_bar(peak: int, budget: int, top: int) -> Text:
    filled = round(WIDTH * peak / top)
    mark = round(WIDTH * budget / top)
    bar = Text("█" * min(filled, mark), "green" if peak <= budget else "yellow")
    bar.append("░" * max(0, mark - filled), "bright_black")
    bar.append("▏", "bold")
    bar.append("█" * max(0, filled - mark), "red")
    bar.append(" budget" if filled <= mark else f" over the budget by {format_bytes(peak - budget)}", "bold")
    return bar


def _alternatives(plan: Any, console: Console) -> None:
    """Other ways, each with what to type under it; exact ones leave the mathematics alone."""
    for exact, title in (
        (True, "other exact ways"),
        (False, "approximate ways: they change the mathematics"),
    ):
        ways = [other for other in plan.alternatives if other.exact == exact]
        if not ways:
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(no_wrap=True, justify="right")
        table.add_column()
        for other in ways:
            way = Text(other.label)
            way.append("\n" + shlex.join(other.overrides), "bright_black")
            verdict = Text("fits", "green") if other.fits else Text("over", "red")
            size, time = format_bytes(other.peak_bytes), f"{short(other.seconds)} a step"
            table.add_row(verdict, size, time, way)
        console.print(Text(title, "bold"))
        console.print(table)
