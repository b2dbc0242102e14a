"""`skimp plan --markdown`: a plan as tables for an issue or a chat, in plain Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skimp.core.units import format_bytes, format_seconds

#: Alternatives that are listed; the plan's JSON has them all.
MOST = 8


def plan_markdown(plan: Mapping[str, Any], versions: Mapping[str, Any] | None = None) -> str:
    """The text, ending in a newline.

    Args:
        plan: `Plan.as_dict()`.
        versions: of what the figures depend on, for the last line; left out when None.
    """
    device = plan["places"]["device"]
    verdict = "fits" if plan["fits"] else "does not fit"
    budget = f"{format_bytes(plan['peak_bytes'])} of {format_bytes(device['budget_bytes'])}"
    lines = [f"**{_cell(plan['model'])}: {verdict}**, {budget} on {_cell(device['name'])}", ""]
    whole = plan["peak_bytes"] or 1
    rows = [(k, format_bytes(v), f"{v / whole:.0%}") for k, v in plan["by_category"].items() if v > 0]
    lines += _table(
        ("at the fullest moment", "bytes", "share"), [*rows, ("**peak**", f"**{format_bytes(whole)}**", "")]
    )
    lines += [
        "",
        f"Fullest: {_cell(plan['where'])}. Predicted: {format_seconds(plan['predicted_step_seconds'])} a step.",
    ]
    lines += ["", *(f"- {_cell(reason)}" for reason in plan["why"])]
    others = plan["alternatives"][:MOST]
    if others:
        cells = [
            (
                "fits" if a["fits"] else "over",
                format_bytes(a["peak_bytes"]),
                format_seconds(a["seconds"]),
                _cell(a["label"]) + ("" if a["exact"] else " (changes the mathematics)"),
                f"`{shlex.join(a['overrides'])}`" if a["overrides"] else "",
            )
            for a in others
        ]
        lines += ["", *_table(("", "peak", "a step", "other way", "to type"), cells)]
        if len(plan["alternatives"]) > MOST:
            lines += ["", f"and {len(plan['alternatives']) - MOST} more (`--json`)"]
    if versions is not None:
        known = ", ".join(f"{k} {versions[k]}" for k in ("skimp", "torch", "transformers") if versions.get(k))
        lines += ["", f"_{known}_"]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(map(str, row)) for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells)]


def _cell(words: Any) -> str:
    """Words that cannot end a cell or begin markup."""
    return str(words).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
