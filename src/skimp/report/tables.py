"""The tables of a report, as HTML: planned against measured, bytes by category, the optimizer's rows, plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from skimp.core.units import format_bytes, format_seconds
from skimp.report.gather import Story
from skimp.report.step_memory import ORDER


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table; cells are HTML already. Every column but the first is aligned to the right in `kind="numbers"`."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    css = f' class="{kind}"' if kind else ""
    return f"<table{css}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def difference(planned: float | None, measured: float | None) -> str:
    """'+0.4 %' of the plan; a dash where one of them is missing."""
    return f"{100 * (measured / planned - 1):+.1f} %" if planned and measured else "–"


def size(value: float | None) -> str:
    return format_bytes(value) if value else "–"


def planned_against_measured(story: Story) -> str:
    """Bytes and seconds as they were foretold and as they came."""
    plan = story.plan
    rows = [_bytes("tensors at the fullest moment", story.planned_tensors, story.measured_tensors)]
    if story.on_cpu:
        rows.append(_bytes("whole process at its highest", plan.get("peak_bytes"), story.resident_peak))
    planned, measured = plan.get("predicted_step_seconds"), story.seconds_per_step
    rows.append(
        [
            "one optimizer step",
            format_seconds(planned) if planned else "–",
            format_seconds(measured) if measured else "–",
            difference(planned, measured),
        ]
    )
    return table(("", "planned", "measured", "difference"), rows, "numbers")


def _bytes(name: str, planned: int | None, measured: int | None) -> list[str]:
    return [name, size(planned), size(measured), difference(planned, measured)]


def categories(story: Story) -> str:
    """Bytes at the fullest moment by category, planned beside measured; each with its colour in the picture."""
    planned = dict(story.plan.get("by_category", {}))
    measured = dict(story.timeline["peak"]["by_category"]) if story.timeline else {}
    if story.baseline:
        planned["process"] = planned.pop("baseline", 0)
        measured["process"] = story.baseline if measured else 0
    rest = planned.pop("allocator", 0)
    names = sorted(
        {n for n, v in (*planned.items(), *measured.items()) if v},
        key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n),
    )
    rows = [
        [
            f'<i class="chip c-{escape(n)}"></i>{escape(n)}',
            size(planned.get(n)),
            size(measured.get(n)),
            escape(MEANS.get(n, "")),
        ]
        for n in reversed(names)
    ]
    if rest:
        peak = story.resident_peak
        over = peak - story.baseline - (story.measured_tensors or 0) if peak and story.measured_tensors else None
        rows.insert(0, ["allocator", size(rest), size(over), MEANS["allocator"]])
    whole = story.resident_peak if story.on_cpu else sum(measured.values())
    rows.append(["<b>sum</b>", f"<b>{size(sum(planned.values()) + rest)}</b>", f"<b>{size(whole)}</b>", ""])
    return table(("at the fullest moment", "planned", "measured", ""), rows, "numbers last-left")


MEANS = {
    "process": "interpreter and libraries, before any tensor",
    "weights": "the parameters",
    "adapters": "the trained additions to frozen weights",
    "optimizer": "what the update rule remembers",
    "batch": "tokens, labels, positions",
    "gradients": "from backward until the step",
    "activations": "kept by forward for backward",
    "logits": "scores of the vocabulary",
    "workspace": "what one operator needs while it runs",
    "allocator": "held by allocators and not in use; measured as the rest",
}


def optimizer_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which rule updates which parameter, and with what; rows that differ in the block number alone are one."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        parts = str(row["parameter"]).split(".")
        name = ".".join("*" if part.isdigit() else part for part in parts)
        key = (
            name,
            " × ".join(f"{n:,}" for n in row["shape"]),
            str(row["rule"]),
            f"{row['weight_decay']:g}",
        )
        grouped.setdefault(key, []).append(int(row["state_bytes"]))
    cells = [
        [f"<code>{escape(key[0])}</code>", f"{len(sizes):,}", *map(escape, key[1:]), size(sum(sizes))]
        for key, sizes in grouped.items()
    ]
    return table(("parameters", "how many", "shape", "rule", "weight decay", "state"), cells, "numbers")


def data(counts: Mapping[str, Any]) -> str:
    """What became of the rows that were read: one line a set, and what was left out with its reason."""
    rows, lost = [], []
    for part in (*counts.get("trains", ()), *counts.get("validations", ())):
        packing = part.get("packing", {})
        numbers = [part.get("rows_read"), *(packing.get(k) for k in ("documents_in", "tokens_in", "rows"))]
        cells = [f"{n:,}" if n is not None else "–" for n in (*numbers, packing.get("trained_tokens"))]
        rows.append([escape(str(part.get("name", ""))), *cells, escape(", ".join(part.get("sources", ())))])
        left = {**part.get("dropped", {}), **{words: packing.get(key) for key, words in LEFT_OUT.items()}}
        lost += [f"{part.get('name')}: {n:,} {why}" for why, n in left.items() if n]
    head = ("", "rows read", "documents", "tokens", "rows packed", "trained tokens an epoch", "from")
    items = "".join(f"<li>{escape(text)}</li>" for text in (*lost, *counts.get("notes", ())))
    return table(head, rows, "numbers last-left") + (f"<ul>{items}</ul>" if items else "")


LEFT_OUT = {
    "truncated_documents": "documents truncated",
    "truncated_tokens": "tokens lost by truncation",
    "dropped_documents": "documents dropped as longer than a row",
    "untrained_documents": "rows dropped: nothing in them to train on",
    "tail_tokens": "tokens dropped: nothing to predict",
    "padding_tokens": "positions of padding",
}


def adapter_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What an adapter added, by target."""
    grouped: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((str(row["target"]), int(row["rank"])), []).append(row)
    cells = [
        [
            f"<code>{escape(target)}</code>",
            f"{len(found):,}",
            str(rank) if rank else "trained in full",
            f"{sum(int(r['parameters']) for r in found):,}",
            size(sum(int(r["bytes"]) for r in found)),
        ]
        for (target, rank), found in grouped.items()
    ]
    return table(("target", "modules", "rank", "parameters", "bytes"), cells, "numbers")


def pairs(values: Mapping[str, Any]) -> str:
    """Names and plain values."""
    rows = [[escape(k), escape(_plain(v))] for k, v in values.items() if v not in (None, "", {}, [])]
    return table(("", ""), rows, "pairs")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(v) for v in value)
    return str(value)
