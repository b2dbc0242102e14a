"""`report.html`: one file, nothing fetched from anywhere; light, dark and paper; what matters first."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.report import tables
from skimp.report.curves import curves
from skimp.report.gather import Story
from skimp.report.live import live, script, style
from skimp.report.memory_svg import memory_svg
from skimp.report.step_memory import StepMemory

ENDS = {
    "finished": "finished",
    "early stop": "stopped early: the held-out loss no longer fell",
    "SIGINT": "stopped by Ctrl-C, saved",
    "SIGTERM": "stopped by SIGTERM, saved",
}


def page(story: Story, memory: StepMemory | None) -> str:
    """The whole document."""
    title = f"{story.name}: {story.plan.get('model', 'a run')}"
    body = "".join(
        [
            _head(story),
            _cards(story),
            _survived(story),
            _memory(story, memory),
            _section("Over the steps", f'<div class="charts">{"".join(curves(story))}</div>'),
            _section("Planned against measured", tables.planned_against_measured(story)),
            _plan(story),
            _samples(story),
            _data(story),
            _details(story),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · skimp</title><style>{style()}</style></head><body><main>{body}"
        "<footer>made by skimp from the files beside this one; made again by "
        f"<code>skimp report {escape(str(story.folder))}</code></footer></main>"
        f"{script() if memory is not None else ''}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _head(story: Story) -> str:
    plan = story.plan
    facts = [escape(plan.get("model", ""))]
    if plan.get("parameters"):
        facts.append(f"{plan['parameters']:,} parameters")
    optimizer, precision = story.recipe.get("optimizer", {}).get("name"), story.recipe.get("precision")
    facts += [escape(str(f)) for f in (optimizer, precision) if f]
    wanted = story.recipe.get("train", {}).get("steps")
    stopped = story.summary.get("stopped")
    if stopped is None:
        end, kind = "did not come to its end", "bad"
    else:
        end, kind = ENDS.get(stopped, stopped), "good" if stopped in ("finished", "early stop") else "warn"
    steps = f"step {story.steps:,}" + (f" of {wanted:,}" if wanted else "")
    return (
        f'<header><h1>{escape(story.name)}</h1><p class="facts">{" · ".join(f for f in facts if f)}</p>'
        f'<p><span class="chip-text {kind}">{escape(end)}</span> <span class="facts">{steps}</span></p></header>'
    )


def _cards(story: Story) -> str:
    cards = []
    peak, budget = (story.resident_peak, story.budget) if story.on_cpu else (story.measured_tensors, story.budget)
    if peak:
        planned = story.plan.get("peak_bytes")
        notes = [f"of {format_bytes(budget)} budget"] if budget else []
        notes += [f"planned {format_bytes(planned)}: {tables.difference(planned, peak)}"] if planned else []
        over = bool(budget and peak > budget)
        name = "memory of the process" if story.on_cpu else "tensors at the peak"
        cards.append(_card(name, format_bytes(peak), notes, "bad" if over else ""))
    if story.held_out is not None:
        before, after = story.held_out
        cards.append(_card("held-out loss", f"{before:.3f} → {after:.3f}", [f"{after - before:+.4f}"]))
    first, last = story.metrics[0]["loss"], story.metrics[-1]["loss"]
    cards.append(_card("training loss", f"{first:.3f} → {last:.3f}", ["first step → last step"]))
    seconds, tokens = sum(m["seconds"] for m in story.metrics), sum(m["tokens"] for m in story.metrics)
    if story.tokens_per_second and story.seconds_per_step:
        notes = [f"{format_seconds(story.seconds_per_step)} a step"]
        cards.append(_card("speed", f"{story.tokens_per_second:,.0f} tokens/s", notes))
    cards.append(
        _card("trained on", f"{tokens:,} tokens", [f"{len(story.metrics):,} steps, {format_seconds(seconds)}"])
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(name: str, value: str, notes: list[str], kind: str = "") -> str:
    lines = "".join(f"<small>{escape(n)}</small>" for n in notes)
    return f'<div class="card {kind}"><span>{escape(name)}</span><b>{escape(value)}</b>{lines}</div>'


def _survived(story: Story) -> str:
    items = "".join(f"<li>{escape(str(event))}</li>" for event in story.summary.get("survived") or ())
    return _section("What it survived", f"<ul>{items}</ul>") if items else ""


def _memory(story: Story, memory: StepMemory | None) -> str:
    if memory is None:
        return _section("Memory", "<p>No step of this run was watched: it ended before its second.</p>")
    process = " The grey ground is the process itself, measured before any tensor." if story.baseline else ""
    line = " The thin black line is what the system counted for the process." if memory.resident else ""
    over = (
        " Dotted: the most that the plan foretold for that phase and block in any micro-batch."
        if memory.planned
        else ""
    )
    if not story.same_plan:
        over = " The run went on under another plan after this step, so no plan is drawn here."
    told = f"<p>Every tensor of one optimizer step, by what it is for.{process}{line}{over}</p>"
    return _section(
        f"Memory over one step (the {_ordinal(memory.step)})",
        f'{told}<div class="wide">{memory_svg(memory)}</div>'
        f"<details><summary>Moment by moment</summary>{live(story, memory, picture=False)}</details>"
        f"{tables.categories(story)}",
    )


def _ordinal(n: int) -> str:
    end = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{end}"


def _plan(story: Story) -> str:
    plan = story.plan
    if not plan:
        return ""
    why = "".join(f"<li>{escape(reason)}</li>" for reason in plan.get("why", ()))
    notes = "".join(f"<li>{escape(note)}</li>" for note in plan.get("notes", ()))
    others = [
        [
            "fits" if a["fits"] else "over",
            format_bytes(a["peak_bytes"]),
            escape(a["label"]) + ("" if a.get("exact", True) else " <em>(changes the mathematics)</em>"),
            f"<code>{escape(' '.join(a.get('overrides', ())))}</code>",
        ]
        for a in plan.get("alternatives", ())
        if {"fits", "peak_bytes", "label"} <= a.keys()
    ]
    body = f"<p>Fullest moment, as planned: {escape(plan.get('where', ''))}.</p><ul>{why}</ul>"
    if others:
        listed = tables.table(("", "peak", "way", "to type"), others)
        body += f"<details><summary>Other ways: {len(others)}</summary>{listed}</details>"
    if notes:
        body += f"<details><summary>Notes</summary><ul>{notes}</ul></details>"
    return _section("What was chosen, and why", body)


def _samples(story: Story) -> str:
    samples = story.summary.get("samples") or {}
    prompt = (story.recipe.get("sample") or {}).get("prompt", "")
    cells = "".join(
        f"<figure><figcaption>{when} training</figcaption><blockquote><b>{escape(prompt)}</b>{escape(samples[when])}"
        "</blockquote></figure>"
        for when in ("before", "after")
        if when in samples
    )
    return _section("The same prompt", f'<div class="samples">{cells}</div>') if cells else ""


def _data(story: Story) -> str:
    counts = story.summary.get("data")
    return _section("Data", tables.data(counts)) if isinstance(counts, dict) else ""


def _details(story: Story) -> str:
    s = story.summary
    parts = [
        ("Adapter, by target", tables.adapter_table(s.get("adapter_table") or ())),
        ("Optimizer and weight decay, by parameter", tables.optimizer_table(s.get("optimizer_table") or ())),
        ("Recipe", f"<pre>{escape(_yaml(story.recipe))}</pre>"),
        ("Machine and versions", tables.pairs(s.get("versions") or {})),
        ("Choices of the plan", f"<pre>{escape(json.dumps(story.plan.get('chosen', {}), indent=1))}</pre>"),
    ]
    return "".join(f"<details><summary>{name}</summary>{body}</details>" for name, body in parts if body)


def _yaml(values: dict[str, Any], indent: str = "") -> str:
    """Plain values as the YAML a person would write; every mapping opened, lists in one line."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", _yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
