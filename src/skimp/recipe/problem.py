"""One thing wrong with a recipe, and the error that carries all of them."""

from __future__ import annotations

from dataclasses import dataclass

from skimp.core.errors import RecipeError


@dataclass(frozen=True)
class Problem:
    """What one key should be, what it is, why that cannot be, and what works.

    Attributes:
        key: the full dotted key, such as "train.batch_tokens".
        expected: what the key takes.
        found: what was written.
        why: the reason, empty when `found` says it all.
        instead: the nearest things that work.
        line: where it is written, such as "quick.yaml, line 7" or "the command line"; empty when not known.
    """

    key: str
    expected: str
    found: str = ""
    why: str = ""
    instead: tuple[str, ...] = ()
    line: str = ""

    def error(self) -> RecipeError:
        """The problem as an error of its own."""
        place = f"  ({self.line})" if self.line else ""
        return RecipeError(f"{self.key}: {self.expected}{place}", self.found, self.why, [i for i in self.instead if i])


class RecipeErrors(RecipeError):
    """All that is wrong with one recipe: `problems` holds each, the message prints them in order."""

    def __init__(self, origin: str, problems: list[Problem]) -> None:
        self.problems = problems
        self.origin = origin
        first = problems[0].error()
        super().__init__(first.asked, first.found, first.why, first.instead)

    def message(self) -> str:
        texts = [p.error().message() for p in self.problems]
        if len(texts) == 1:
            return texts[0]
        return f"{self.origin}: {len(texts)} problems\n" + "\n".join(texts)
