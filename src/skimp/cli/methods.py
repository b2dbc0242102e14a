"""`skimp methods`: every technique, its paper, what it attacks; no technique is imported for it."""

from __future__ import annotations

import json
from typing import Annotated, Any

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
        f
        for f in known
        if (attacks is None or attacks in f.attacks)
        and (kind is None or f.kind == kind)
        and (exact is None or f.exact == exact)
    ]
    if as_json:
        print(json.dumps([f.as_dict() for f in chosen], indent=2, ensure_ascii=False))
        return
    from skimp.cli.console import console

    screen = console()
    longest = max((len(f.name) for f in chosen), default=0)
    for f in chosen:
        screen.print(described(f, longest, min(screen.width, 120)))
    screen.print(f"{len(chosen)} methods; skimp methods --json has all their facts")


def described(f: Any, longest: int, width: int) -> Any:
    """One method as a block: name and nature, what it is, what it saves, its paper; wrapped between words."""
    from rich.table import Table
    from rich.text import Text

    nature = ("exact" if f.exact else "approximate") + f" {f.kind}"
    attacked = f", attacks {', '.join(f.attacks)}" if f.attacks else ""
    block = Table(box=None, show_header=False, pad_edge=False, width=width)
    block.add_column(no_wrap=True, width=longest)
    block.add_column()
    block.add_row(Text(f.name, "bold"), Text(nature + attacked, "cyan"))
    for line in (f.summary, f"saves {f.saves}" if f.saves else ""):
        if line:
            block.add_row("", Text(line))
    if f.paper:
        block.add_row("", Text(f"{f.paper.title} ({f.paper.year}, arXiv {f.paper.arxiv})", "bright_black"))
    return block
