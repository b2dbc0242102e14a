"""`skimp methods`: every technique, its paper, what it attacks; no technique is imported for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skimp.cli import complete

if TYPE_CHECKING:
    from skimp.core.registry import Facts


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="A method, for all about it; or words to look for.", autocompletion=complete.method_names),
    ] = None,
    attacks: Annotated[
        str | None,
        typer.Option(help="Only methods that shrink this: weights, gradients, …", autocompletion=complete.attacked),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only this kind: 'update rule', codec, …", autocompletion=complete.kinds)
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Only for this stage: fine-tuning, …", autocompletion=complete.stages)
    ] = None,
    exact: Annotated[bool | None, typer.Option("--exact/--approximate", help="Only exact or approximate ones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the techniques: what each saves, its paper, exact or approximate; or tell all about one."""
    from skimp.core.registry import methods

    known = methods()
    one = known.get(name.strip().lower()) if name is not None else None
    chosen = select([one] if one else list(known.values()), None if one else name, attacks, kind, stage, exact)
    if as_json:
        print(json.dumps([f.as_dict() for f in chosen], indent=2, ensure_ascii=False))
        return
    from skimp.cli.console import console

    screen = console()
    if one is not None:
        from skimp.cli.method import page

        page(one, known, screen)
        return
    longest = max((len(f.name) for f in chosen), default=0)
    for f in chosen:
        screen.print(described(f, longest, min(screen.width, 120)))
    screen.print(f"{len(chosen)} of {len(known)} methods; skimp methods NAME tells all about one")


def select(
    known: list[Facts],
    words: str | None,
    attacks: str | None,
    kind: str | None,
    stage: str | None,
    exact: bool | None,
) -> list[Facts]:
    """The methods that pass every filter.

    Raises:
        SkimpError: a filter that no method has, with the values there are; or filters that leave none.
    """
    from skimp.core.errors import SkimpError, did_you_mean

    for asked, attribute, what in (
        (attacks, "attacks", "--attacks"),
        (kind, "kind", "--kind"),
        (stage, "stages", "--stage"),
    ):
        values = complete.facts_of(attribute)
        if asked is not None and asked not in values:
            raise SkimpError(f"{what} {asked}", "no method", instead=did_you_mean(asked, values))
    chosen = [
        f
        for f in known
        if (attacks is None or attacks in f.attacks)
        and (kind is None or f.kind == kind)
        and (stage is None or stage in f.stages)
        and (exact is None or f.exact == exact)
        and (words is None or says(f, words))
    ]
    if not chosen:
        given = [f"'{words}'"] if words else []
        given += [f"--{k} {v}" for k, v in (("attacks", attacks), ("kind", kind), ("stage", stage)) if v]
        given += [] if exact is None else ["--exact" if exact else "--approximate"]
        near = did_you_mean(words, [f.name for f in known]) if words else "fewer of these"
        raise SkimpError(f"skimp methods {' '.join(given)}", "no method", instead=[near, "skimp methods: all of them"])
    return chosen


def says(f: Facts, words: str) -> bool:
    """Whether every word stands somewhere in what is known of a method."""
    text = f"{f.name} {f.kind} {f.summary} {f.saves} {f.paper or ''} {' '.join(f.attacks)}".lower()
    return all(word in text for word in words.lower().split())


def described(f: Facts, longest: int, width: int) -> Any:
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
