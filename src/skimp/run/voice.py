"""What a session tells while it runs; the command line shows it, a library user may ignore it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What a finished step tells the screen; memory in resident bytes, now and at its highest."""

    step: int
    steps: int
    loss: float
    lr: float
    seconds: float
    tokens_per_second: float
    memory: int
    peak: int


class Voice:
    """Silent by itself; override what you want to hear."""

    def say(self, text: str) -> None:
        """A sentence for a person."""

    def planned(self, plan: Any) -> None:
        """The plan, before it is executed or refused."""

    def reading(self, event: dict[str, Any]) -> None:
        """Progress of tokenising."""

    def loading(self, done: int, total: int) -> None:
        """Progress of loading weights."""

    def step(self, progress: Progress) -> None:
        """A finished optimizer step."""
