"""`skimp plan`: will it fit, how, and what else would."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from skimp.cli import complete


def command(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe file; leave out with --model.", autocompletion=complete.recipe_or_override),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value overrides of any recipe key.", autocompletion=complete.overrides),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Preset, Hub id, folder, config.json or GGUF.", autocompletion=complete.models)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for this card: 24GB, rtx-4090, …", autocompletion=complete.cards)
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Most memory on the computing device, such as 10GB.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Sequence length (data.seq_len).")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows in one optimizer step.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Update rule.", autocompletion=complete.update_rules)] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16-mixed or bf16.", autocompletion=complete.precisions)
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Then take two real steps in a process of their own, and say how they came.")
    ] = False,
    html: Annotated[
        str | None, typer.Option("--html", help="Write the plan as a page with an interactive timeline here.")
    ] = None,
    png: Annotated[str | None, typer.Option("--png", help="Write the timeline of the planned step here.")] = None,
    frontier: Annotated[
        str | None, typer.Option(help="Draw memory against time over all exact ways: a file .svg, .png or .json.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Each decision against its other values.")] = False,
    arena: Annotated[
        bool, typer.Option("--arena", help="Fixed addresses for one step's tensors, and what they would take.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(help="A table of what fits: seq=1k,4k batch=1..8 (rows at once).")
    ] = None,
    largest: Annotated[str | None, typer.Option(help="The largest that fits: seq or batch (rows at once).")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the plan as tables for an issue or a chat.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Simulate everything anew; read and keep no profiles.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Simulate the run and choose the exact techniques that fit. Exit code 0: fits, 3: not, 2: bad input."""
    from skimp.api import plan as make
    from skimp.core.errors import RecipeError
    from skimp.core.lean import stay_lean
    from skimp.core.memory.process import set_malloc_policy

    if sweep is not None or largest is not None:
        of_one = {
            "--probe": probe,
            "--html": html,
            "--png": png,
            "--frontier": frontier,
            "--explain": explain,
            "--arena": arena,
        }
        asked = [name for name, value in (of_one | {"--markdown": markdown}).items() if value]
        if asked:
            table_of = "--sweep" if sweep is not None else "--largest"
            raise RecipeError(f"skimp plan {table_of} {asked[0]}", "a table of runs", f"{asked[0]} is of one plan")
    if frontier is not None:
        from skimp.cli.plan_sweep import check_file

        check_file(frontier)
    if probe and (frontier or explain or arena):
        found_too = "--frontier, --explain or --arena"
        raise RecipeError("skimp plan --probe", found_too, "they are of a plan alone", "one at a time")
    files = [path for path in (html, png) if path is not None]
    if files:
        from skimp.cli.plan_files import check

        check(html, png)
    if markdown and as_json:
        raise RecipeError("skimp plan --markdown --json", "two forms of one answer", instead="one of the two")
    stay_lean()
    set_malloc_policy()
    if no_cache:
        os.environ["SKIMP_PLAN_CACHE"] = "0"  # for this process and the child of --probe
    words = list(overrides or [])
    if recipe is not None and "=" in recipe and model is not None:
        words.insert(0, recipe)
        recipe = None
    if (recipe is None) == (model is None):
        raise RecipeError(
            "skimp plan",
            "neither a recipe nor --model" if recipe is None else f"a recipe '{recipe}' and --model {model}",
            instead=[
                "skimp plan examples/quickstart.yaml",
                "skimp plan --model llama-3-8b --gpu 24GB --seq 4096",
            ],
        )
    source: Any = (
        recipe
        if recipe is not None
        else {
            "model": model,
            "data": {"train": "pydoc"},
            "output": "runs/plan",
            "train": {"steps": 1},
        }
    )
    if sweep is not None or largest is not None:
        from skimp.cli.plan_sweep import table

        words += short(None, None, optimizer, precision, fresh=False)
        sys.exit(table(source, words, sweep, largest, seq=seq, batch=batch, gpu=gpu, memory=memory, as_json=as_json))
    words += short(seq, batch, optimizer, precision, fresh=recipe is None)
    taken = None
    if probe:
        from skimp.api import probe as take

        if gpu is not None:
            raise RecipeError("--probe", f"a plan for {gpu}", "steps are taken on this machine's CPU", "one of the two")
        found, taken = take(source, *words, memory=memory)
    else:
        also = [name for name, asked in (("frontier", frontier), ("explain", explain), ("arena", arena)) if asked]
        found = make(source, *words, gpu=gpu, memory=memory, also=also)
    if as_json:
        print(json.dumps(found.as_dict() | ({"probe": taken.as_dict()} if taken is not None else {}), indent=2))
    elif markdown:
        from skimp.report.plan_markdown import plan_markdown
        from skimp.run.environment import environment

        print(plan_markdown(found.as_dict(), environment()), end="")
    else:
        from skimp.cli.console import console
        from skimp.cli.show import print_plan

        print_plan(found, console())
        if taken is not None:
            from skimp.cli.closing import print_trial

            print_trial(found, taken, console())
        if explain:
            from skimp.plan.frontier import sentence

            console().print("decisions, all else equal", style="bold")
            for decision in found.decisions:
                console().print(f"  · {sentence(decision)}")
        if found.arena is not None:
            from skimp.plan.arena import sentences

            for line in sentences(found.arena):
                console().print(line, soft_wrap=True)
    if frontier is not None:
        from skimp.cli.plan_sweep import draw

        draw(found.as_dict(), frontier)
    if files:
        from skimp.api import drawn
        from skimp.cli.plan_files import write

        write(found, drawn(source, *words, of=found), html, png)
    sys.exit(0 if found.fits else 3)


def short(seq: int | None, batch: int | None, optimizer: str | None, precision: str | None, fresh: bool) -> list[str]:
    """The common flags as overrides. Without a recipe, an optimizer step is `batch` rows (4 unless given)."""
    words = []
    if seq is not None:
        words.append(f"data.seq_len={seq}")
    if batch is not None or (seq is not None and fresh):
        rows = batch or 4
        length = seq if seq is not None else 512
        words.append(f"train.batch_tokens={rows * length}")
    if optimizer is not None:
        words.append(f"optimizer={optimizer}")
    if precision is not None:
        words.append(f"precision={precision}")
    return words
