"""`skimp export`: a run, a checkpoint or any model as a folder or file that other people's tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from skimp.cli import complete

KINDS = ("merged", "peft", "adapter", "gguf")


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, an export, a model folder, GGUF, preset, Hub id.", autocompletion=complete.opened
        ),
    ],
    to: Annotated[
        str, typer.Option("--to", help="merged (a folder), peft or adapter (the adapter alone) or gguf (one file).")
    ],
    output: Annotated[Path | None, typer.Option(help="Folder or .gguf file; beside the run when not given.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16; gguf also q8_0. As trained when left out.")
    ] = None,
    shard_size: Annotated[str | None, typer.Option(help="Most bytes in one safetensors file; 5GB.")] = None,
    pre: Annotated[str | None, typer.Option(help="gguf: llama.cpp's name of the text splitting rule.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: a step, a folder name, or best.")] = None,
    onto: Annotated[
        str | None,
        typer.Option(help="On a base kept in a codec: dequantised (as trained; the default) or original weights."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export of skimp's there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a model for other tools, tensor by tensor: the process never holds all of it."""
    from skimp.core.memory.process import resident, set_malloc_policy

    set_malloc_policy()
    from skimp.cli.console import console
    from skimp.cli.use import writing
    from skimp.core.errors import RecipeError, did_you_mean
    from skimp.core.units import format_bytes, parse_bytes
    from skimp.export.loss_change import choose, loss_change, sentence
    from skimp.run.found import find

    if to not in KINDS:
        raise RecipeError(f"--to {to}", "unknown", instead=did_you_mean(to, KINDS))
    shard = None if shard_size is None else parse_bytes(shard_size, "--shard-size")
    screen = console()
    with find(model, checkpoint) as found, writing(screen, as_json) as show:
        target = output or default_target(found, to)
        if to in ("peft", "adapter") and onto is not None:
            raise RecipeError(f"--onto {onto} with --to {to}", "the adapter alone", instead="leave --onto out")
        chosen = choose(found, onto)
        facts = write(to, found, target, shard, pre, dtype=dtype, force=force, progress=show)
        if chosen is not None and to == "merged":
            facts["merge"] = loss_change(found, target, chosen)
    facts["rss_peak_bytes"] = resident().peak
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    screen.print(f"{facts['target']}: {facts['tensors']} tensors, {format_bytes(facts['bytes'])}, {facts['dtype']}")
    if "merge" in facts:
        screen.print(sentence(facts["merge"]), soft_wrap=True)
    if "largest_error" in facts:
        screen.print(f"read back: every tensor is the model's, largest rounding {facts['largest_error']:.3g}")
    screen.print(f"whole process at the peak: {format_bytes(facts['rss_peak_bytes'])}")
    if to == "merged":
        screen.print(f'try it: skimp generate {facts["target"]} "Once upon a time"', soft_wrap=True)


def write(to: str, found: Any, target: Path, shard: int | None, pre: str | None, **options: Any) -> dict[str, Any]:
    """The exporter of a kind; an option of another kind is refused."""
    from skimp.core.errors import RecipeError
    from skimp.export.gguf import export_gguf
    from skimp.export.merged import SHARD, export_merged

    for name, value, kind in (("--shard-size", shard, "merged"), ("--pre", pre, "gguf")):
        if value is not None and to != kind:
            raise RecipeError(f"{name} with --to {to}", "an option of --to " + kind, instead=f"leave {name} out")
    if to in ("peft", "adapter"):
        from skimp.export.adapter import export_adapter, export_own

        if options["dtype"] is not None:
            raise RecipeError(
                f"--dtype {options['dtype']} with --to {to}",
                "an adapter is float32, as it was trained",
                instead="leave --dtype out",
            )
        return (export_adapter if to == "peft" else export_own)(found, target, force=options["force"])
    if to == "gguf":
        return export_gguf(found, target, pre=pre, **options)
    return export_merged(found, target, shard=shard or SHARD, **options)


def default_target(found: Any, to: str) -> Path:
    """`RUN/export/merged`, or a name after the model in this folder."""
    name = {"gguf": "model.gguf"}.get(to, to)
    if found.folder is not None:
        return Path(found.folder) / "export" / name
    stem = Path(found.asked).stem if found.asked.endswith(".gguf") else Path(found.asked).name
    return Path(f"{stem}-{to}" + (".gguf" if to == "gguf" else ""))
