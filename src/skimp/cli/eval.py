"""`skimp eval`: loss, perplexity and token accuracy of a run, a checkpoint or any model, in flat memory."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import typer

from skimp.cli import complete


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, an export, a model folder, GGUF, preset, Hub id.", autocompletion=complete.opened
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value overrides of data.* keys.", autocompletion=complete.overrides)
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text to score instead of the run's held-out text.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: a step, a folder name, or best.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens in a row (data.seq_len).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score at most so many rows of each set.")] = None,
    budget: Annotated[str | None, typer.Option(help="Most memory of the process, such as 1GB.")] = None,
    precision: Annotated[str | None, typer.Option(help="Compute in fp32 or bf16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")] = False,
) -> None:
    """Score held-out text: loss, perplexity and token accuracy, whatever its size in the same memory."""
    from skimp.core.memory.process import resident, set_malloc_policy

    set_malloc_policy()
    from skimp.cli.console import console
    from skimp.cli.use import loading, reading
    from skimp.core.units import format_bytes, parse_bytes
    from skimp.run.evaluation import choose_way, score
    from skimp.run.found import find
    from skimp.run.held_out import held_out
    from skimp.run.opened import open_model, settle_dtype

    screen = console()
    words = [*(overrides or []), *([f"data.seq_len={seq}"] if seq is not None else [])]
    with find(model, checkpoint) as found:
        with reading(screen, quiet or as_json) as show:
            text = held_out(found, list(data or []), words, show.tokenising, show.say)
        dtype = settle_dtype(found, precision)
        way = choose_way(found, dtype, text.seq_len, parse_bytes(budget, "--budget") if budget else None)
        with loading(screen, quiet or as_json) as show_load:
            opened = open_model(found, precision, show_load)
    scores = []
    with reading(screen, quiet or as_json) as show:
        for name, rows in text.sets.items():
            scores.append(score(opened, rows, name, way, limit, partial(show.rows, name)))
    facts: dict[str, Any] = {
        "model": model,
        "what": found.why,
        "step": found.step,
        "precision": str(dtype).removeprefix("torch."),
        "seq_len": text.seq_len,
        "sets": [s.as_dict() for s in scores],
        "rows_at_once": way.rows,
        "planned_rss_bytes": way.resident,
        "rss_peak_bytes": resident().peak,
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("held-out text", "loss", "perplexity", "token accuracy", "tokens", "rows", "tokens/s"):
        table.add_column(column, justify="left" if column == "held-out text" else "right")
    for s in scores:
        rate = s.tokens / s.seconds if s.seconds else 0.0
        numbers = (f"{s.loss:.4f}", f"{s.perplexity:,.2f}", f"{s.accuracy:.1%}", f"{s.tokens:,}", f"{s.rows:,}")
        table.add_row(s.name, *numbers, f"{rate:,.0f}")
    screen.print(f"{model}: {found.why}", soft_wrap=True)
    screen.print(table)
    planned = f"planned {format_bytes(way.resident)}, measured {format_bytes(resident().peak)}"
    screen.print(f"whole process at the peak: {planned}; {way.rows} rows of {text.seq_len} tokens at once")
