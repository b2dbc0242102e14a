"""`skimp generate`: go on from a prompt, token by token, from a run, a checkpoint, an export or any model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
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
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; - or none reads one from stdin.")] = None,
    lines: Annotated[Path | None, typer.Option(help="A file with one prompt a line; - for stdin.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; higher is freer.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the output; may be given again.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws; the same seed gives the same text.")] = 0,
    checkpoint: Annotated[str | None, typer.Option(help="Of a run: a step, a folder name, or best.")] = None,
    precision: Annotated[str | None, typer.Option(help="Compute in fp32 or bf16.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, when it is done.")] = False,
) -> None:
    """Generate text: streamed to the terminal, reproducible, over a cache that grows with the text alone."""
    from skimp.core.memory.process import set_malloc_policy
    from skimp.run.sampling import Sampling

    set_malloc_policy()
    sampling = Sampling(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    asked = read_prompts(prompts or [], lines)
    from skimp.cli.console import console
    from skimp.cli.use import loading
    from skimp.run.found import find
    from skimp.run.generate import Decoder, Generated, stream
    from skimp.run.opened import open_model
    from skimp.run.words import TextStream, Words

    with find(model, checkpoint) as found:
        words = Words(found.tokenizer, found.config)
        ids = [words.encode(prompt) for prompt in asked]
        with loading(console(stderr=True), as_json) as show:
            opened = open_model(found, precision, show)
    for number, (prompt, start) in enumerate(zip(asked, ids, strict=True)):
        done, text = Generated(), TextStream(words, start, stop or [])
        if not as_json:
            print(prompt, end="", flush=True)
        for token in stream(Decoder(opened, len(start) + tokens), start, tokens, sampling, words.ends, number, done):
            said(text.add(token), as_json)
            if text.stopped:
                done.stop = "stop text"
                break
        said(text.finish(), as_json)
        if as_json:
            print(json.dumps(record(prompt, text.text, done), ensure_ascii=False), flush=True)
        else:
            print()


def record(prompt: str, text: str, done: Any) -> dict[str, Any]:
    """The JSON of one finished text."""
    return {
        "prompt": prompt,
        "text": text,
        "tokens": len(done.ids),
        "stop": done.stop,
        "prompt_tokens": done.prompt_tokens,
        "prompt_seconds": round(done.prompt_seconds, 4),
        "tokens_per_second": done.tokens_per_second,
    }


def said(piece: str, silent: bool) -> None:
    """A piece of text as it comes; nothing where the whole is printed at the end."""
    if piece and not silent:
        print(piece, end="", flush=True)


def read_prompts(given: list[str], lines: Path | None) -> list[str]:
    """The prompts of the command line, of a file of lines, or of standard input as a whole.

    Raises:
        DataError: none, two sources at once, or a file that is not there or not UTF-8.
    """
    from skimp.core.errors import DataError

    if given and lines is not None:
        raise DataError(
            "prompts", f"{len(given)} on the command line and a file of lines {lines}", instead="one of them"
        )
    if lines is not None:
        try:
            text = sys.stdin.read() if str(lines) == "-" else lines.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"prompts in {lines}", f"{getattr(error, 'strerror', None) or 'not UTF-8'}") from None
        found = [line for line in text.splitlines() if line.strip()]
    elif given and given != ["-"]:
        found = given
    else:
        found = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not found or not all(prompt for prompt in found):
        raise DataError("a prompt", "an empty one" if found else "none", instead='skimp generate MODEL "Once upon"')
    return found
