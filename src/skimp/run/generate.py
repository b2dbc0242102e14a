"""Text from a model, token by token over a cache: read the prompt in pieces, then one position at a time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from skimp.core.errors import ModelError
from skimp.run.kv_cache import GrowingCache
from skimp.run.opened import Opened
from skimp.run.sampling import Sampling
from skimp.run.sparse_cache import SparseCache

#: Tokens of a prompt that go through the model at once: what is alive meanwhile does not grow with the prompt.
PIECE = 512


class Decoder:
    """A text and the model's memory of it.

    Args:
        opened: the model.
        room: positions to make room for at once, where the length is known beforehand.
    """

    def __init__(self, opened: Opened, room: int = 0) -> None:
        self.opened = opened
        self.ids: list[int] = []
        # A side network's blocks are numbered behind the model's own, and keep their share in the same cache.
        numbered = (getattr(module, "layer_idx", None) for module in opened.model.modules())
        layers = max([len(opened.structure.blocks) - 1, *(n for n in numbered if isinstance(n, int))]) + 1
        room = min(room, opened.structure.positions)
        self._cache: GrowingCache | SparseCache = (
            GrowingCache(layers, room) if opened.sparse is None else SparseCache(opened.sparse, layers, room)
        )
        self._base: nn.Module = opened.model.get_submodule(opened.structure.base)
        # transformers 5 renamed `past_key_values`; the old name still works there, with a warning a call.
        known = inspect.signature(self._base.forward).parameters
        self._keyword = "cache" if "cache" in known else "past_key_values"

    @torch.no_grad()
    def feed(self, ids: Sequence[int]) -> Tensor:
        """Go on with `ids`; returns the float32 logits (vocabulary,) of what follows the last one.

        Raises:
            ModelError: no ids, or the text would be longer than the model's positions.
        """
        logits = self.feed_rows(torch.tensor([list(ids)]))[0]
        self.ids += ids
        return logits

    @torch.no_grad()
    def feed_rows(self, ids: Tensor) -> Tensor:
        """The same for several texts of one length, without a record of them: (rows, n) ids give (rows, vocabulary).

        Raises:
            ModelError: as `feed`.
        """
        opened, positions, past = self.opened, self.opened.structure.positions, self._cache.held
        if not ids.numel() or past + ids.shape[1] > positions:
            raise ModelError(
                f"{past + ids.shape[1]} tokens of text",
                f"the model has {positions} positions" if ids.numel() else "nothing to go on from",
                instead=f"at most {positions} tokens" if ids.numel() else "one token at least",
            )
        hidden = torch.empty(0)
        for start in range(0, ids.shape[1], PIECE):
            piece, past = ids[:, start : start + PIECE], self._cache.held
            at = torch.arange(past, past + piece.shape[1]).unsqueeze(0)
            out = self._base(input_ids=piece, position_ids=at, use_cache=True, **{self._keyword: self._cache})
            hidden = out.last_hidden_state
        return opened.head.logits_from(hidden[:, -1:])[:, 0]

    def keep_rows(self, rows: Tensor) -> None:
        """Of several texts go on with these alone, numbers (rows,) in rising order."""
        self._cache.keep_rows(rows)

    def turn_to(self, ids: Sequence[int]) -> Tensor:
        """Make `ids` the whole text, reading again only what differs from the text so far; as `feed`."""
        same = 0
        while same < min(len(ids) - 1, len(self.ids)) and ids[same] == self.ids[same]:
            same += 1
        same = self._cache.keep(same)
        del self.ids[same:]
        return self.feed(ids[same:])


@dataclass
class Generated:
    """What came out.

    Attributes:
        ids: the new tokens, without the one that ended the text.
        stop: "end" (an end token), "length" (so many were asked for), "positions" (the model has no more).
        prompt_tokens, prompt_seconds, seconds: to read the prompt, and to write.
    """

    ids: list[int] = field(default_factory=list)
    stop: str = "length"
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Of the writing; None before the second token."""
        return (len(self.ids) - 1) / self.seconds if len(self.ids) > 1 and self.seconds else None


def stream(
    decoder: Decoder,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    ends: Collection[int] = (),
    number: int = 0,
    into: Generated | None = None,
) -> Iterator[int]:
    """Yield new ids as they come; stop at an end token, after `tokens`, or where the positions end.

    Args:
        decoder: fresh, or one whose text begins like `prompt`: what is equal is not read again.
        prompt: the whole text so far, at least one id.
        sampling, number: see `Sampling.choose`.
        ends: ids that end a text; they are not yielded.
        into: filled as it goes, so that it is right even when the caller stops early.

    Raises:
        ModelError: the prompt fills the model's positions.
    """
    done = into if into is not None else Generated()
    positions = decoder.opened.structure.positions
    if len(prompt) >= positions:
        raise ModelError(
            f"a prompt of {len(prompt):,} tokens",
            f"the model has {positions:,} positions",
            "none is left to write in",
            "a shorter prompt",
        )
    begin = time.perf_counter()
    logits = decoder.turn_to(prompt)
    done.prompt_tokens, done.prompt_seconds = len(prompt), time.perf_counter() - begin
    begin = time.perf_counter()
    text = list(prompt)
    for left in range(tokens, 0, -1):
        following = sampling.choose(logits, text, number)
        if following in ends:
            done.stop = "end"
            break
        text.append(following)
        done.ids.append(following)
        done.seconds = time.perf_counter() - begin
        yield following
        if left > 1:
            if len(text) >= positions:
                done.stop = "positions"
                break
            logits = decoder.feed([following])
