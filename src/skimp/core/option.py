"""A key of a method's own in a recipe: its default, its range, and how a written value is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One key. Its kind is that of its default; `kind` says it where the default is None.

    Attributes:
        default: what holds when nothing is written.
        about: what it does, in one sentence.
        least, most: the closed range of a number; above, below: the same with the end left out.
        choices: the words it takes, where it takes words.
        kind: "number", "whole", "flag", "text" or "numbers"; empty takes the default's.
    """

    default: bool | int | float | str | tuple[float, ...] | None
    about: str
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    choices: tuple[str, ...] = ()
    kind: str = ""

    @property
    def sort(self) -> str:
        """Its kind."""
        names = {bool: "flag", int: "whole", float: "number", str: "text", tuple: "numbers"}
        return self.kind or names[type(self.default)]

    @property
    def takes(self) -> str:
        """What it takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        ends = [(self.least, "at least"), (self.above, "above"), (self.most, "at most"), (self.below, "below")]
        limits = " and ".join(f"{word} {end:g}" for end, word in ends if math.isfinite(end))
        count = len(self.default) if isinstance(self.default, tuple) else 0
        plain = {"flag": "true or false", "whole": "a whole number", "number": "a number", "text": "text"}
        words = plain.get(self.sort, f"a list of {count} numbers")
        nothing = " or null" if self.default is None else ""
        return f"{words} {limits}".strip() + nothing

    def read(self, value: Any) -> Any:
        """The value as it is used, from a number or its spelling ('2e-5'), a word, true or false, or a list.

        Raises:
            ValueError: it is none that this key takes.
        """
        if value is None and self.default is None:
            return None
        if self.sort == "numbers":
            wanted = len(self.default) if isinstance(self.default, tuple) else None
            if not isinstance(value, (list, tuple)) or (wanted is not None and len(value) != wanted):
                raise ValueError(self.takes)
            return tuple(self._number(v) for v in value)
        if self.sort == "flag":
            return self._exactly(value, isinstance(value, bool))
        if self.sort == "text":
            return self._exactly(value, isinstance(value, str) and (not self.choices or value in self.choices))
        return self._number(value)

    def takes_it(self, value: Any) -> bool:
        """Whether `read` would take the value."""
        try:
            self.read(value)
        except ValueError:
            return False
        return True

    def _exactly(self, value: Any, right: bool) -> Any:
        if not right:
            raise ValueError(self.takes)
        return value

    def _number(self, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(self.takes)
        try:
            number = float(value)
        except ValueError:
            raise ValueError(self.takes) from None
        inside = self.least <= number <= self.most and self.above < number < self.below
        if not inside or not math.isfinite(number) or (self.sort == "whole" and not number.is_integer()):
            raise ValueError(self.takes)
        return int(number) if self.sort == "whole" else number


#: Keys that many update rules share.
BETAS = Option(
    (0.9, 0.999), "Decay of the first and of the second moment, each per step.", least=0, below=1
)  # fmt: skip
EPS = Option(1e-8, "Added to the root of the second moment.", above=0)
ADAM: dict[str, Option] = {"betas": BETAS, "eps": EPS}
