"""`skimp methods`: every technique, its paper, what it attacks; no technique is imported for it."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    attacks: Annotated[str | None, typer.Option(help="Only methods that shrink this: weights, gradients, …")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind: 'update rule', codec, …")] = None,
    exact: Annotated[bool | None, typer.Option("--exact/--approximate", help="Only exact or approximate ones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the techniques: what each saves, its paper, exact or approximate."""
    from skimp.core.errors import SkimpError, did_you_mean
    from skimp.core.registry import methods

    known = list(methods().values())
    for asked, values, what in (
        (attacks, {a for f in known for a in f.attacks}, "--attacks"),
        (kind, {f.kind for f in known}, "--kind"),
    ):
        if asked is not None and asked not in values:
            raise SkimpError(f"{what} {asked}", "no method", instead=did_you_mean(asked, values))
    chosen = [
        f for f in known
        if (attacks is None or attacks in f.attacks) and (kind is None or f.kind == kind)
        and (exact is None or f.exact == exact)
    ]
    if as_json:
        print(json.dumps([f.as_dict() for f in chosen], indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(chosen)} methods", title_justify="left", pad_edge=False)
    for column in ("name", "kind", "exact", "attacks", "saves", "paper"):
        table.add_column(column, overflow="fold")
    for f in chosen:
        paper = f"{f.paper.year} {f.paper.arxiv}" if f.paper else ""
        table.add_row(f.name, f.kind, "exact" if f.exact else "approx.", ", ".join(f.attacks), f.saves, paper)
    Console().print(table)
