"""`skimp plan --html`: a plan as one page that fetches nothing: verdict, an interactive timeline, who owns the peak."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.report import tables
from skimp.report.gather import Story
from skimp.report.live import live, script, style
from skimp.report.step_memory import ORDER, StepMemory, step_memory


def story_of(plan: Mapping[str, Any], drawn: Mapping[str, Any]) -> Story:
    """A plan and its simulated step in the form of a run's folder, so that the same drawings serve both."""
    told = {k: v for k, v in plan.items() if k != "moments"}  # the step drawn is the plan: no second line of it
    return Story(Path(str(plan.get("model", "plan"))), {}, told, {}, [], [], dict(drawn))


def plan_page(plan: Mapping[str, Any], drawn: Mapping[str, Any]) -> str:
    """The whole document.

    Args:
        plan: `Plan.as_dict()`.
        drawn: `plan.drawn.drawn(...)`.
    """
    story = story_of(plan, drawn)
    memory = step_memory(story)
    name = escape(str(plan["model"]))
    verdict = ("fits", "good") if plan["fits"] else ("does not fit", "bad")
    body = [
        f'<header><h1>{name}</h1><p><span class="chip-text {verdict[1]}">{verdict[0]}</span> '
        f'<span class="facts">{_facts(plan)}</span></p></header>',
        _timeline(story, memory) if memory is not None else "",
        _section("At the fullest moment", _peak(drawn) + _categories(plan)),
        _section("The fullest moment of each place", _places(drawn)),
        _section("What was chosen, and why", _why(plan)),
        _section("Other ways", _others(plan)),
        _section("Notes", _list([*plan.get("notes", ()), *_seen(plan)])),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: a plan · skimp</title><style>{style()}</style></head><body><main>{''.join(body)}"
        "<footer>made by <code>skimp plan --html</code>; simulated, nothing was trained</footer></main>"
        f"{script()}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _list(items: list[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{lines}</ul>" if lines else ""


def _facts(plan: Mapping[str, Any]) -> str:
    device = plan["places"]["device"]
    parts = [
        f"{format_bytes(plan['peak_bytes'])} of {format_bytes(device['budget_bytes'])} on {device['name']}",
        f"{plan['parameters']:,} parameters",
        f"{format_seconds(plan['predicted_step_seconds'])} a step predicted",
    ]
    if plan["trained"] != plan["parameters"]:
        parts.insert(2, f"{plan['trained']:,} of them trained")
    return escape(" · ".join(parts))


def _timeline(story: Story, memory: StepMemory) -> str:
    simulated = (story.timeline or {}).get("simulated", {})
    part, of = simulated.get("micro_batches", 1), simulated.get("of", 1)
    less = f" Of its {of} micro-batches two are drawn: the third is like the second." if part < of else ""
    told = f"<p>Every tensor of one optimizer step, by what it is for, over predicted seconds.{less}</p>"
    return _section("Memory over one step, simulated", told + live(story, memory))


def _peak(drawn: Mapping[str, Any]) -> str:
    at = drawn["peak"]
    parts = [f"phase <b>{escape(at['phase'] or '–')}</b>", f"owner <b>{escape(at['owner'] or '–')}</b>"]
    parts.append(f"operator <code>{escape(at['operator'] or '–')}</code>")
    return f"<p>{', '.join(parts)}: {format_bytes(at['total'])} of tensors.</p>"


def _categories(plan: Mapping[str, Any]) -> str:
    """The planned peak by category, from the top of the picture down."""
    sizes = {"process" if name == "baseline" else name: size for name, size in plan["by_category"].items() if size > 0}
    names = sorted(sizes, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER), reverse=True)
    rows = [
        [f'<i class="chip c-{escape(n)}"></i>{escape(n)}', format_bytes(sizes[n]), escape(tables.MEANS.get(n, ""))]
        for n in names
    ]
    rows.append(["<b>sum</b>", f"<b>{format_bytes(sum(sizes.values()))}</b>", ""])
    return tables.table(("", "planned", ""), rows, "numbers last-left")


def _places(drawn: Mapping[str, Any]) -> str:
    rows = [
        [
            escape(p["phase"] or "–"),
            escape(p["owner"] or "–"),
            format_bytes(p["bytes"]),
            f"<code>{escape(p['operator'])}</code>",
            ", ".join(
                f"{escape(k)} {format_bytes(v)}" for k, v in sorted(p["by_category"].items(), key=lambda i: -i[1])
            ),
        ]
        for p in drawn.get("places", ())
    ]
    return tables.table(("phase", "owner", "highest", "operator then", "of it"), rows, "places")


def _shares(sizes: Mapping[str, int]) -> str:
    """From the largest down; what is under a thousandth is left out."""
    least = sum(sizes.values()) / 1000
    known = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{escape(k)} {format_bytes(v)}" for k, v in known if v >= least)


def _why(plan: Mapping[str, Any]) -> str:
    return _list(list(plan.get("why", ())))


def _others(plan: Mapping[str, Any]) -> str:
    rows = [
        [
            "fits" if a["fits"] else "over",
            format_bytes(a["peak_bytes"]),
            format_seconds(a["seconds"]),
            escape(a["label"]) + ("" if a["exact"] else " <em>(changes the mathematics)</em>"),
            f"<code>{escape(' '.join(a['overrides']))}</code>",
        ]
        for a in plan.get("alternatives", ())
    ]
    return tables.table(("", "peak", "a step", "way", "to type"), rows)


def _seen(plan: Mapping[str, Any]) -> list[str]:
    seen = plan.get("seen") or {}
    if not seen.get("runs"):
        return []
    return [
        f"{seen['runs']} earlier runs on this machine: plans {seen['mean_error']:+.1%} of what was taken on the mean, "
        f"{seen['least_error']:+.1%} to {seen['largest_error']:+.1%}"
    ]
