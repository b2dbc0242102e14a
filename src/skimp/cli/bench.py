"""`skimp bench`: methods side by side; `pretrain` trains a small Llama from scratch with each update rule,
`finetune` a small model with each adapter."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Methods side by side on one task.")


@app.callback()
def _bench() -> None:
    """Methods side by side on one task; what was run is kept, and the same command goes on."""


@app.command("pretrain")
def pretrain(
    profile: Annotated[str, typer.Option(help="Size: seconds, short, tiny (1 M parameters), small, medium.")] = "tiny",
    methods: Annotated[str, typer.Option(help="Names with commas; none: all update rules (short: eight).")] = "",
    seeds: Annotated[str, typer.Option(help="With commas; the first chooses rates; none: 0,1,2 (short: 0).")] = "",
    output: Annotated[Path, typer.Option(help="Folder of results and table.")] = Path("runs/bench-pretrain"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time, one thread each; none: one a core.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no run after so many minutes.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Only print the table of what was run.")] = False,
) -> None:
    """Pre-train a small Llama with every method: equal tokens, own learning rates, a table of perplexity and memory.

    The same command goes on where it was stopped, at any moment and by anything.
    """
    from skimp.bench.pretrain import TABLE, Pretrain
    from skimp.bench.profiles import chosen, profile_of
    from skimp.bench.queue import default_jobs
    from skimp.cli.console import console

    size = profile_of(profile)
    names = chosen([name.strip() for name in methods.split(",") if name.strip()], size)
    screen = console()
    with _progress(screen) as show:
        which = _seeds(seeds) if seeds else list(size.seeds)
        bench = Pretrain(size, names, which, output, jobs or default_jobs(), show)
        done = True
        if not table:
            signal.signal(signal.SIGTERM, _terminated)
            try:
                done = bench.run(minutes)
            except KeyboardInterrupt:
                print(f"skimp: stopped; the same command goes on ({len(bench.due())} runs due)", file=sys.stderr)
                sys.exit(130)
    print(bench.table())
    screen.print(f"{bench.work / TABLE}" + ("" if done else ": not complete; the same command goes on"), soft_wrap=True)


@app.command("finetune")
def finetune(
    profile: Annotated[
        str, typer.Option(help="Size: seconds, short, tiny, smollm2; default is the last two.")
    ] = "default",
    methods: Annotated[str, typer.Option(help="Names with commas; none: full and every adapter (smollm2: six).")] = "",
    seeds: Annotated[str, typer.Option(help="With commas; the first chooses rates; none: the profile's.")] = "",
    output: Annotated[Path, typer.Option(help="Folder of results and table.")] = Path("runs/bench-finetune"),
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time, one thread each; none: one a core.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Begin no run after so many minutes.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Only print the table of what was run.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as it is in the file.")] = False,
) -> None:
    """Fine-tune a small model with every adapter: own learning rates, a table of right answers, memory and speed.

    The same command goes on where it was stopped, at any moment and by anything.
    """
    import time

    from skimp.bench.finetune import TABLE, Finetune
    from skimp.bench.queue import default_jobs
    from skimp.bench.tuning import chosen, tunings_of
    from skimp.cli.bench_table import screen_table
    from skimp.cli.console import console
    from skimp.report.methods_picture import methods_svg

    sizes = tunings_of(profile)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    asked = [(size, chosen(names, size), _seeds(seeds) if seeds else list(size.seeds)) for size in sizes]
    screen, until = console(), None if minutes is None else time.monotonic() + 60 * minutes
    done, written = True, []
    for size, which, seeded in asked:
        with _progress(screen, "fine-tuning") as show:
            bench = Finetune(size, which, seeded, output, jobs or default_jobs(), show)
            if not table and done:
                signal.signal(signal.SIGTERM, _terminated)
                try:
                    done = bench.run(None if until is None else max(0.0, (until - time.monotonic()) / 60))
                except KeyboardInterrupt:
                    print(f"skimp: stopped; the same command goes on ({len(bench.due())} runs due)", file=sys.stderr)
                    sys.exit(130)
        rows = bench.rows()
        written.append(bench.table())
        (bench.work / f"finetune-{size.name}.svg").write_text(methods_svg(rows, f"skimp bench finetune: {size.name}"))
        if not as_markdown:
            screen.print(screen_table(rows, size.name))
    text = "\n".join(written)
    (bench.work / TABLE).write_text(text, encoding="utf-8")
    if as_markdown:
        print(text)
    screen.print(f"{bench.work / TABLE}" + ("" if done else ": not complete; the same command goes on"), soft_wrap=True)


def _terminated(*_: Any) -> None:
    """Once: the runs are asked to save and end, and are waited for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _seeds(text: str) -> list[int]:
    from skimp.core.errors import SkimpError

    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise SkimpError(f"--seeds {text}", "not a list of different whole numbers from 0 on", instead="--seeds 0,1,2")
    return found


class _progress:
    """A bar of runs with the time left; on a pipe, a line a run."""

    def __init__(self, console: Any, what: str = "pre-training") -> None:
        from skimp.cli.use import bar

        self.console, self.what = console, what
        self.bar = bar(console, False)
        self.task: Any = None

    def __enter__(self) -> Any:
        self.bar.start()
        return self.show

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, done: int, expected: int, left: float, record: dict[str, Any] | None) -> None:
        from math import exp

        from skimp.core.units import format_seconds

        facts = f"of {expected} runs · {format_seconds(left)} left"
        if record is not None:
            found = record["status"] if record["loss"] is None else f"perplexity {exp(record['loss']):.2f}"
            if "right" in record:
                found += ", right: " + ", ".join(f"{t} {right}/{of}" for t, (right, of) in record["right"].items())
            what = f"{record['method']} at {record['lr']:g}, seed {record['seed']}: {found}"
            self.console.print(f"{done} {facts} · {what}", soft_wrap=True)
        if self.task is None:
            self.task = self.bar.add_task(self.what, total=expected, facts=facts)
        self.bar.update(self.task, completed=done, total=expected, facts=facts)
