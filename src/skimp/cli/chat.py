"""`skimp chat`: a conversation in the terminal, by the model's chat template, over one cache for all its turns."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from skimp.cli import complete

HELP = "/reset begins anew, /quit or Ctrl-D ends"


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, an export, a model folder, GGUF, preset, Hub id.", autocompletion=complete.opened
        ),
    ],
    message: Annotated[str | None, typer.Argument(help="Ask this and end; without it, a conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None,
    template: Annotated[str | None, typer.Option(help="A Jinja chat template: a file, or chatml.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy; higher is freer.")] = 0.7,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass; 0.95.")] = None,
    top_k: Annotated[int, typer.Option(help="Keep so many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be given again.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws; the same seed gives the same answers.")] = 0,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: a step, a folder name, or best.")] = None,
    precision: Annotated[str | None, typer.Option(help="Compute in fp32 or bf16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer, when it is done.")] = False,
) -> None:
    """Talk with a model. From a pipe, each line is a turn of the user."""
    from skimp.core.memory.process import set_malloc_policy
    from skimp.run.sampling import Sampling

    set_malloc_policy()
    mass = top_p if top_p is not None else 0.95 if temperature > 0 else 1.0
    sampling = Sampling(temperature, mass, top_k, min_p, repetition_penalty, seed)
    from skimp.cli.console import console
    from skimp.cli.use import loading
    from skimp.run.found import find
    from skimp.run.generate import Decoder
    from skimp.run.opened import open_model
    from skimp.run.talk import Talk
    from skimp.run.words import Words

    with find(model, checkpoint) as found:
        words = Words(found.tokenizer, found.config)
        talk = Talk(words, template, system)
        with loading(console(stderr=True), as_json) as show:
            opened = open_model(found, precision, show)
    decoder = Decoder(opened)
    if message is not None:
        reply(talk, decoder, message, tokens, sampling, stop or [], as_json)
        return
    asked = sys.stdin.isatty()
    if asked and not as_json:
        print(f"{model}: {found.why}. {HELP}", file=sys.stderr)
    while (line := read_line(asked)) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            talk.forget()
        elif line.strip():
            reply(talk, decoder, line, tokens, sampling, stop or [], as_json)


def reply(talk: Any, decoder: Any, message: str, tokens: int, sampling: Any, stops: list[str], as_json: bool) -> None:
    """One turn of each: streamed, then kept in the conversation."""
    from skimp.cli.generate import record, said
    from skimp.run.generate import Generated, stream
    from skimp.run.words import TextStream

    ids = talk.ask(message)
    done, text = Generated(), TextStream(talk.words, ids, stops)
    try:
        for token in stream(decoder, ids, tokens, sampling, talk.ends, len(talk.turns), done):
            said(text.add(token), as_json)
            if text.stopped:
                done.stop = "stop text"
                break
    except KeyboardInterrupt:  # Ctrl-C ends the answer, not the conversation
        done.stop = "interrupted"
    said(text.finish(), as_json)
    talk.answered(text.text)
    if as_json:
        print(json.dumps(record(message, text.text, done), ensure_ascii=False), flush=True)
    else:
        print()


def read_line(asked: bool) -> str | None:
    """The next line of the user; None at the end."""
    try:
        return input("> ") if asked else input()
    except (EOFError, KeyboardInterrupt):
        return None
