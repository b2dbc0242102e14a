"""Text to ids and back in this process, and text that is shown as it comes.

Training never loads a tokenizer; generation needs one at every token. A GGUF's is converted once, by a child process,
into the cache, so that this one only ever reads a `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skimp.core.errors import ModelError
from skimp.data.fingerprint import cache_folder, tokenizer_fingerprint
from skimp.data.tokenizer import LoadedTokenizer, load_tokenizer
from skimp.data.vocabulary import check_vocabulary
from skimp.run.sample import in_child

#: What bytes that are no whole character decode to.
UNFINISHED = "�"


def tokenizer_folder(location: Path) -> Path:
    """The folder that holds the tokenizer as `tokenizer.json`: its own, or the converted one in the cache.

    Raises:
        ModelError: it cannot be read.
    """
    folder = location if location.is_dir() else location.parent
    if location.suffix != ".gguf" and (folder / "tokenizer.json").is_file():
        return folder
    kept = cache_folder() / "tokenizers" / tokenizer_fingerprint(str(location), cache_folder())
    if not (kept / "tokenizer.json").is_file():
        in_child(str(location), {"encode": "a"})
    return kept


class Words:
    """A tokenizer with what generation must know besides.

    Attributes:
        tokenizer: the loaded one.
        folder: where it lies.
        ends: ids that end a text: the tokenizer's own and those the model's generation_config names.
    """

    def __init__(self, location: Path, config: dict[str, Any]) -> None:
        self.folder = tokenizer_folder(location)
        self.tokenizer: LoadedTokenizer = load_tokenizer(str(self.folder), None)
        self.vocabulary = int(config["vocab_size"])
        self.ends = {self.tokenizer.end, *_named_ends(config, self.folder)}

    def encode(self, text: str, whole: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            whole: it begins the text, so the tokenizer's own begin token comes before it.

        Raises:
            ModelError: a token the model has no embedding for, or none at all.
        """
        ids: list[int] = self.tokenizer.encode.encode(text, add_special_tokens=whole).ids
        if not ids:
            raise ModelError(f"a prompt {text!r}", "no tokens", "a model needs one token to go on from")
        check_vocabulary(max(ids), self.tokenizer.size, self.vocabulary, "the prompt")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        text: str = self.tokenizer.encode.decode(list(ids), skip_special_tokens=True)
        return text


def _named_ends(config: dict[str, Any], folder: Path) -> list[int]:
    """eos_token_id of the config and of generation_config.json: one id or a list, text models often name several."""
    named: list[Any] = [config.get("eos_token_id")]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            named.append(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{file}", f"not a JSON object: {error}", instead="remove it, or write it again") from None
    flat = [i for entry in named for i in (entry if isinstance(entry, list) else [entry])]
    return [i for i in flat if isinstance(i, int)]


class TextStream:
    """Ids in, text out, each piece as soon as no later token can change it.

    A character of several bytes may be spread over several tokens, and a token's text may depend on the one before it
    (a leading space). So the text of a window is decoded with and without the newest ids, and what was added is given
    out; while it ends in a broken character it waits. With stop texts, what might be the beginning of one waits too.

    Args:
        words: the tokenizer.
        before: ids of the prompt, the window the first new token is decoded behind.
        stops: texts that end the output; they are not part of it.
    """

    def __init__(self, words: Words, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self.words, self.stops = words, [stop for stop in stops if stop]
        self.stopped = ""
        self._window = list(before[-8:])
        # A prompt that ends inside a character: the first new token completes it.
        self._shown = len(self.words.decode(self._window).rstrip(UNFINISHED))
        self._held = ""
        self.text = ""

    def add(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        self._window.append(token)
        whole = self.words.decode(self._window)
        if whole.endswith(UNFINISHED):
            return ""
        piece, self._shown = whole[self._shown :], len(whole)
        if len(self._window) > 64:
            # A window that starts later reads the same behind its first few tokens.
            self._window = self._window[-8:]
            self._shown = len(self.words.decode(self._window))
        return self._release(piece)

    def _release(self, piece: str) -> str:
        self._held += piece
        for stop in self.stops:
            at = self._held.find(stop)
            if at >= 0:
                self.stopped, self._held = stop, self._held[:at]
                return self.finish()
        waits = max((_overlap(self._held, stop) for stop in self.stops), default=0)
        out, self._held = self._held[: len(self._held) - waits], self._held[len(self._held) - waits :]
        self.text += out
        return out

    def finish(self) -> str:
        """What was still waiting, when nothing more comes; a character that stayed broken is shown as such."""
        if not self.stopped:
            self._held += self.words.decode(self._window)[self._shown :]
            self._shown = len(self.words.decode(self._window))
        out, self._held = self._held, ""
        self.text += out
        return out


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
