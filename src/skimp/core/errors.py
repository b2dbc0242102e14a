"""Errors that say what was asked, what was found, why it cannot be, and the nearest thing that works.

Every bad input ends in one of these: the command line prints the message without a traceback and exits with
`exit_code`; a library user catches `SkimpError`. Nothing in this file imports torch, so that a misspelt key is
refused in milliseconds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SkimpError(Exception):
    """A refusal a person can act on.

    Args:
        asked: what was asked for, in the user's own terms (key, file, row, module).
        found: what was found instead.
        why: the reason it cannot be; empty when `found` says it all.
        instead: the nearest things that work, each a full sentence or command, with bytes where memory is the matter.
    """

    exit_code = 2

    def __init__(self, asked: str, found: str = "", why: str = "", instead: Iterable[str] | str = ()) -> None:
        self.asked = asked
        self.found = found
        self.why = why
        self.instead = [instead] if isinstance(instead, str) else list(instead)
        super().__init__(self.message())

    def message(self) -> str:
        """The whole message, one fact per line."""
        lines = [self.asked]
        if self.found:
            lines.append(f"  found:   {self.found}")
        if self.why:
            lines.append(f"  because: {self.why}")
        for way in self.instead:
            lines.append(f"  instead: {way}")
        return "\n".join(lines)


class RecipeError(SkimpError):
    """A key of the recipe is unknown, of the wrong type or out of range."""


class DataError(SkimpError):
    """A data file is missing, empty, malformed or not text; the message names file and row."""


class ModelError(SkimpError):
    """A model cannot be read, has an unknown architecture, or does not go with its tokenizer or sequence length."""


class CheckpointError(SkimpError):
    """A checkpoint is missing, incomplete, of another run, or could not be written."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that was complete and whose bytes changed on disk since; an older one may be sound."""


class OffloadError(SkimpError):
    """Bytes moved to the host or to disk cannot be used: they came back changed, or were changed while away."""


class DamagedOffload(OffloadError):
    """Bytes came back from the host or a disk other than they went: nothing there can be trusted any more."""


class NonFiniteError(SkimpError):
    """The loss or a gradient became NaN or infinite; names the step and the parameter."""


class ConflictError(SkimpError):
    """Two techniques that cannot go together; gives the mathematical reason and the way out."""


class EffectError(SkimpError):
    """A technique that was switched on did nothing; names it."""


class DoesNotFit(SkimpError):
    """Nothing exact fits the budget. Exit code 3, so that scripts can tell it from bad input."""

    exit_code = 3


class OutOfMemory(SkimpError):
    """Memory ran short while training and nothing smaller would do; what was learned until then is saved.

    Exit code 3, as for a run that did not fit in the first place.
    """

    exit_code = 3


def did_you_mean(word: str, known: Iterable[str], limit: int = 3) -> str:
    """A sentence naming the known words nearest to `word`, or the first few of them when none is near."""
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=limit, cutoff=0.55)
    if near:
        return "did you mean " + " or ".join(f"'{n}'" for n in near) + "?"
    shown = ", ".join(options[:20])
    return f"known: {shown}" + (", …" if len(options) > 20 else "")
