"""`skimp doctor`: is this machine fit, and what mends it; with a run: what it died of, and how to go on; with a memory
snapshot: what was on the card."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skimp.cli.complete import run_folders

if TYPE_CHECKING:
    from skimp.run.doctor.autopsy import Autopsy
    from skimp.run.doctor.finding import Finding

MARKS = {"ok": ("·", "green"), "note": ("!", "yellow"), "wrong": ("✗", "red")}
CHECK_SECONDS = 180


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder, or a CUDA memory snapshot; leave out for this machine.", autocompletion=run_folders
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Of the machine: self-tests of kernels, tracker, disk. Of a run: its checkpoint's bytes."
        ),
    ] = False,
    plan: Annotated[
        str | None, typer.Option(help="Of a snapshot: the run's folder, or plan.json, to hold it against.")
    ] = None,
    output: Annotated[str, typer.Option(help="Where runs will be written.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Look at this machine, at a run that died, or at a memory snapshot of PyTorch's.

    Exit code 0: all is well, 2: something is not.
    """
    from skimp.core.errors import SkimpError
    from skimp.run.doctor.snapshot import looks_like_one

    if plan is not None and (run is None or Path(run).is_dir()):
        raise SkimpError(
            "--plan", "no snapshot", "it is what a snapshot is held against", "skimp doctor FILE --plan RUN"
        )
    if run is not None and looks_like_one(Path(run)):
        from skimp.cli.snapshot import examine as examine_snapshot

        sys.exit(0 if examine_snapshot(Path(run), Path(plan) if plan else None, as_json) else 2)
    if run is not None:
        from skimp.run.doctor.autopsy import autopsy

        found = autopsy(Path(run), check)
        print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False)) if as_json else show_autopsy(found)
        sys.exit(0 if found.verdict.well and not found.sound else 2)
    findings = examine(Path(output), check)
    wrong = [f for f in findings if f.state == "wrong"]
    if as_json:
        print(
            json.dumps({"well": not wrong, "findings": [f.as_dict() for f in findings]}, indent=2, ensure_ascii=False)
        )
    else:
        show_findings(findings)
    sys.exit(2 if wrong else 0)


def examine(output: Path, check: bool) -> list[Finding]:
    """Everything about this machine, in the order in which it is shown."""
    from skimp.run.doctor import machine, software

    probe = software.probe()
    found = [*machine.machine(), *software.software(probe), *software.kernels(probe), *software.accelerators(probe)]
    found += [*software.extras(), *machine.files(output), *machine.plans(probe)]
    return found + (checked(output) if check else [])


def checked(output: Path) -> list[Finding]:
    """The self-check, in a process of its own: a wrong kernel may end it."""
    from skimp.run.doctor.finding import Finding
    from skimp.run.doctor.software import child, python

    told = child([sys.executable, "-m", "skimp.run.doctor.check", str(output)], CHECK_SECONDS)
    mend = f"{python()} -m skimp.kernels.native, then again; if it stays, it is a bug of skimp's: report it"
    if "crash" in told:
        return [Finding("check", "self-check", f"ended by {told['crash']}", "wrong", mend)]
    return [
        Finding(
            "check",
            c["name"],
            c["said"],
            "wrong" if c["passed"] is False else "ok",
            mend if c["passed"] is False else "",
        )
        for c in told["checks"]
    ]


def show_findings(findings: list[Finding]) -> None:
    """One line a finding, under its group; what mends it below."""
    from rich.text import Text

    from skimp.cli.console import console, grid

    screen = console()
    longest = max(len(f.name) for f in findings)
    for group in dict.fromkeys(f.group for f in findings):
        screen.print(Text(group, "bold"))
        rows = grid(screen.width, longest)
        for f in findings:
            if f.group == group:
                mark, colour = MARKS[f.state]
                rows.add_row(Text(f"  {mark}", colour), Text(f.name), Text(f.value))
                if f.mend:
                    rows.add_row("", "", Text(f"→ {f.mend}", "cyan"))
        screen.print(rows)
    notes, wrong = (sum(f.state == s for f in findings) for s in ("note", "wrong"))
    verdict = Text("all a run needs is here", "green") if not wrong else Text(f"{wrong} broken (✗)", "bold red")
    if notes:
        verdict.append(f"; {notes} could be better (!)", "yellow")
    screen.print(verdict)


def show_autopsy(found: Autopsy) -> None:
    """What happened, what is kept, what to change, how to go on."""
    from rich.text import Text

    from skimp.cli.console import console, grid

    screen, seen = console(), found.seen
    of = f", step {seen.step}{f' of {seen.steps}' if seen.steps else ''}" if seen.step else ""
    loss = f", loss {seen.metrics.loss:.4f}" if seen.metrics.loss is not None else ""
    colour = "green" if found.verdict.well else "bold red"
    screen.print(
        Text.assemble((f"{seen.folder}: ", "bold"), (found.verdict.headline, colour), of, loss), soft_wrap=True
    )
    parts: list[tuple[str, list[Text]]] = [
        ("what was seen", [Text(line) for line in found.verdict.evidence]),
        ("what is kept", [Text(line) for line in found.kept()]),
        ("what to change", [Text.assemble((c.what, "cyan"), f"\n{c.why}" if c.why else "") for c in found.changes]),
    ]
    for title, lines in parts:
        if lines:
            screen.print(Text(title, "bold"))
            rows = grid(screen.width)
            for line in lines:
                rows.add_row("  ·", line)
            screen.print(rows)
    if found.command:
        screen.print(Text("to train further" if found.verdict.kind == "finished" else "go on with", "bold"))
        screen.print(Text(f"  {found.command}", "cyan"), soft_wrap=True)
