"""A conversation with a model: turns as text by its chat template, and the answer read on from them."""

from __future__ import annotations

from typing import Any

from skimp.core.errors import ModelError
from skimp.data.chat import Chat, template_text
from skimp.data.messages import RowError
from skimp.run.words import Words


class Talk:
    """Turns so far, and what the model reads of them.

    Args:
        words: the tokenizer, with its own template if it has one.
        template: a Jinja file or a built-in name instead of the tokenizer's own.
        system: the first turn, where the model is to be told how to behave.

    Attributes:
        turns: `{"role", "content"}` each.
        ends: ids that end an answer: the model's own and the token the template puts behind an answer.

    Raises:
        ModelError: there is no template, or it refuses the turns.
    """

    def __init__(self, words: Words, template: str | None = None, system: str | None = None) -> None:
        own = words.tokenizer
        source = template_text(template) or own.template
        if not source:
            raise ModelError(
                f"a conversation with the tokenizer in {words.folder}",
                "no chat template",
                "how turns are marked is the model's own choice; a base model has made none",
                [
                    "--template chatml, if it was trained on that form",
                    "--template FILE.jinja, the template of the model's chat version",
                    "skimp generate goes on from plain text",
                ],
            )
        self.words = words
        self._chat = Chat(source, own.special, own.markers, str(words.folder))
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[dict[str, Any]] = list(self._first)
        self.ends = words.ends | self._turn_ends()

    def ask(self, text: str) -> list[int]:
        """Add a user's turn; the ids the model goes on from.

        Raises:
            ModelError: the template refuses the turns.
        """
        self.turns.append({"role": "user", "content": text})
        return self._ids(self._text(self.turns, ask=True))

    def answered(self, text: str) -> None:
        """Add the model's turn."""
        self.turns.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        """Back to the beginning; the system's turn stays."""
        self.turns = list(self._first)

    def _text(self, turns: list[dict[str, Any]], ask: bool) -> str:
        try:
            return self._chat.text(turns, None, "the conversation", ask)
        except RowError as error:
            ways = ["--template, another one", "without --system" if self._first else "turns of user and assistant"]
            raise ModelError(error.asked, error.found, error.why, ways) from error

    def _ids(self, text: str) -> list[int]:
        """The template writes its special tokens itself: a begin token of the tokenizer's own would be a second one."""
        return self.words.encode(text, whole=False)

    def _turn_ends(self) -> set[int]:
        """The special token behind an answer, found by rendering one: '<|im_end|>' where the end of text is another."""
        probe = "an answer"
        turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": probe}]
        _, _, after = self._text([*self._first, *turns], ask=False).rpartition(probe)
        token = next((m for m in sorted(self._chat.markers, key=len, reverse=True) if after.startswith(m)), None)
        number = None if token is None else self.words.tokenizer.encode.token_to_id(token)
        return set() if number is None else {int(number)}
