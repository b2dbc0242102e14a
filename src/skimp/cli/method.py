"""`skimp methods NAME`: all that is known of one technique, on one page of the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skimp.core.registry import Facts


def page(f: Facts, known: Mapping[str, Facts], screen: Any) -> None:
    """Facts, paper, what it goes with, how it is switched on, where its code is."""
    from rich.padding import Padding
    from rich.text import Text

    from skimp.cli.console import grid
    from skimp.core.source import docstring

    screen.print(Text(f.name, "bold"))
    screen.print(Text(f.summary[:1].upper() + f.summary[1:]))
    rows = grid(screen.width, max(len(name) for name, _ in facts(f)), mark=False)
    for name, value in facts(f):
        rows.add_row(Text(name, "cyan"), Text(value))
    screen.print(rows)
    screen.print(Text("goes with", "bold"))
    rows = grid(screen.width)
    for name, reason, instead in against(f, known):
        rows.add_row("  ✗", Text.assemble((name, "red"), f": {reason}\n", ("instead: ", "cyan"), instead))
    rows.add_row("  ·", "every other method")
    screen.print(rows)
    if f.snippet:
        screen.print(Text("in a recipe", "bold"))
        screen.print(Text(f"  {f.snippet}"), soft_wrap=True)
    if f.options:
        screen.print(Text("options", "bold"))
        rows = grid(screen.width, max(len(key) for key in f.options), mark=False)
        for key, option in f.options.items():
            default = "null" if option.default is None else str(option.default)
            rows.add_row(Text(key, "cyan"), Text(f"{option.takes}; {default}. {option.about}"))
        screen.print(rows)
    screen.print(Text("from Python", "bold"))
    module, _, name = f.where.partition(":")
    screen.print(Text(f"  from {module} import {name}"), soft_wrap=True)
    about = docstring(f.where)
    if about:
        screen.print(Text("in detail", "bold"))
        rows = grid(screen.width, 0, mark=False)
        rows.add_row(Text(flowing(about)))
        screen.print(Padding(rows, (0, 0, 0, 2)))


def facts(f: Facts) -> list[tuple[str, str]]:
    """(name, value) of everything that is known, in the order of a first question to the last."""
    from skimp.core.source import line_of, source_file

    nature = "exact: the mathematics of a run stays; the planner may choose it"
    changed = "approximate: it changes the mathematics; only you choose it"
    at, line = source_file(f.where), line_of(f.where)
    rows = [
        ("kind", f.kind),
        ("attacks", ", ".join(f.attacks) or "nothing: it is the yardstick"),
        ("nature", nature if f.exact else changed),
        ("saves", f.saves),
        ("stages", ", ".join(f.stages)),
        ("needs", "; ".join(f.needs)),
        ("paper", f"{f.paper.title}, {f.paper.year}, {link(f)}".removesuffix(", ") if f.paper else ""),
        ("code", f"{near(at)}{f':{line}' if line else ''}" if at else f.where),
    ]
    return [(name, value) for name, value in rows if value]


def near(path: Path) -> str:
    """As one would type it from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def flowing(text: str) -> str:
    """Paragraphs without their line breaks, so that they fill any window; lists, tables and code keep theirs."""
    parts = text.split("\n\n")
    as_is = re.compile(r"^(\s|[-*|])", re.M)
    return "\n\n".join(part if as_is.search(part) else " ".join(part.split()) for part in parts)


def link(f: Facts) -> str:
    """The paper's address; empty where there is none."""
    if f.paper is None or not f.paper.arxiv:
        return ""
    return f.paper.arxiv if "://" in f.paper.arxiv else f"https://arxiv.org/abs/{f.paper.arxiv}"


def against(f: Facts, known: Mapping[str, Facts]) -> list[tuple[str, str, str]]:
    """(method, reason, way out) of every conflict, whichever of the two states it."""
    from skimp.core.registry import refusal

    found = {name: said for name, other in known.items() if name != f.name and (said := refusal(f, other))}
    return [(name, conflict.reason, conflict.instead) for name, conflict in sorted(found.items())]
