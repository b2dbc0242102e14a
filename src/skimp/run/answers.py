"""Greedy answers to many prompts: prompts of one length go through together, so no position is padding.

A batch of equal lengths needs no mask that one prompt alone would not have, so what comes out is what `generate`
gives for each prompt, up to the rounding of products with more rows. Rows that have ended are taken out of the batch.

`python -m skimp.run.answers MODEL QUESTIONS OUT` is the process in which a benchmark asks a model it has trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import ModelError
from skimp.core.read import read
from skimp.run.generate import Decoder
from skimp.run.opened import Opened

#: Rows at once: wider batches make a CPU no faster.
WIDEST = 64
#: Bytes that the caches and logits of a batch may take.
ROOM = 256_000_000


def rows_at_once(opened: Opened, positions: int, room: int = ROOM) -> int:
    """How many rows of so many positions go through together within `room` bytes; one at least.

    A row keeps 2 · layers · kv heads · head size numbers a position (a side network's blocks are counted as the model's
    own), and has float32 logits of one position twice.
    """
    config: Any = opened.model.config
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    numbers = 2 * 2 * len(opened.structure.blocks) * heads * size * positions
    row = numbers * opened.dtype.itemsize + 2 * 4 * int(config.vocab_size)
    return max(1, min(WIDEST, room // row))


def batches(prompts: Sequence[Sequence[int]], widest: Callable[[int], int]) -> Iterator[list[int]]:
    """Numbers of prompts that go through together: all of one length, shorter ones first.

    Args:
        widest: the most rows of a length.
    """
    of: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        of.setdefault(len(prompt), []).append(index)
    for length in sorted(of):
        rows = widest(length)
        for start in range(0, len(of[length]), rows):
            yield of[length][start : start + rows]


@torch.no_grad()
def together(
    opened: Opened, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int] = ()
) -> list[list[int]]:
    """The likeliest ids after each prompt, all of one length; without the id that ends a text.

    Args:
        tokens: new ids at most.
        ends: ids that end a text.

    Raises:
        ModelError: prompts of different lengths, none, or more positions than the model has.
    """
    lengths = {len(prompt) for prompt in prompts}
    positions = opened.structure.positions
    if len(lengths) != 1 or not min(lengths) or min(lengths) + tokens > positions:
        raise ModelError(
            f"{len(prompts)} prompts at once, of {sorted(lengths)} tokens, and {tokens} more",
            f"the model has {positions} positions",
            "rows of a batch have one length and end within the model's positions",
        )
    out: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    decoder = Decoder(opened, min(lengths) + tokens)
    following: Tensor = torch.tensor([list(prompt) for prompt in prompts])
    for left in range(tokens, 0, -1):
        likeliest = decoder.feed_rows(following).argmax(-1)
        ids = [int(read(one, expect=0.0)) for one in likeliest]
        going = [row for row, token in enumerate(ids) if token not in ends]
        for row in going:
            out[alive[row]].append(ids[row])
        if not going or left == 1:
            break
        following = likeliest.unsqueeze(1)
        if len(going) < len(alive):
            chosen = torch.tensor(going)
            decoder.keep_rows(chosen)
            following = following[chosen]
            alive = [alive[row] for row in going]
    return out


def answers(
    opened: Opened, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int], room: int = ROOM
) -> list[list[int]]:
    """Greedy answers to prompts of any lengths, in their order."""
    out: list[list[int]] = [[] for _ in prompts]
    for group in batches(prompts, lambda length: rows_at_once(opened, length + tokens, room)):
        for index, ids in zip(group, together(opened, [prompts[i] for i in group], tokens, ends), strict=True):
            out[index] = ids
    return out


def main(argv: Sequence[str]) -> None:
    """MODEL (whatever `skimp generate` takes), QUESTIONS (JSON: a list of prompts), OUT (JSON: of texts), TOKENS."""
    model, questions, out, tokens = argv
    from skimp.core.memory.process import set_malloc_policy
    from skimp.run.found import find
    from skimp.run.opened import open_model
    from skimp.run.words import Words

    set_malloc_policy()
    with find(model) as found:
        words = Words(found.tokenizer, found.config)
        opened = open_model(found)
    prompts = [words.encode(prompt) for prompt in json.loads(Path(questions).read_text(encoding="utf-8"))]
    texts = [words.decode(ids) for ids in answers(opened, prompts, int(tokens), words.ends)]
    aside = Path(f"{out}.part")
    aside.write_text(json.dumps(texts), encoding="utf-8")
    os.replace(aside, out)


if __name__ == "__main__":
    main(sys.argv[1:])
