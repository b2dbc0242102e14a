"""What the verbs that use a model show while they wait: loading, tokenising, rows scored with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from skimp.core.units import format_bytes, format_seconds


@contextmanager
def loading(console: Console, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of tensors loaded, gone when they are."""
    with bar(console, quiet) as progress:
        task = progress.add_task("loading weights", total=None, facts="tensors")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def writing(console: Console, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of tensors written, gone when they are."""
    with bar(console, quiet) as progress:
        task = progress.add_task("writing", total=None, facts="tensors")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def reading(console: Console, quiet: bool) -> Iterator[Reading]:
    """A bar of what is being read, gone at the end."""
    with bar(console, quiet) as progress:
        yield Reading(progress, console, quiet)


def bar(console: Console, quiet: bool) -> Progress:
    """A progress line that leaves nothing behind; nothing at all on a pipe."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:,.0f} {task.fields[facts]}"),
        console=console,
        transient=True,
        disable=quiet or not console.is_terminal,
    )


class Reading:
    """Progress of tokenising and of scoring rows; on a pipe, a line for every tenth of the rows."""

    def __init__(self, progress: Progress, console: Console, quiet: bool) -> None:
        self.progress, self.console, self.quiet = progress, console, quiet
        self._tasks: dict[str, Any] = {}
        self._tenth = 0

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text), soft_wrap=True)

    def tokenising(self, event: dict[str, Any]) -> None:
        facts = f"rows, {int(event.get('tokens', 0)):,} tokens"
        self._show("tokenising", int(event.get("rows", 0)), None, facts)

    def rows(self, name: str, reading: Any) -> None:
        facts = (
            f"of {reading.total:,} rows · {reading.tokens_per_second:,.0f} tok/s · "
            f"{format_seconds(reading.seconds_left)} left · memory {format_bytes(reading.memory)}"
        )
        self._show(f"scoring {name}", reading.rows, reading.total, facts)
        tenth = 10 * reading.rows // reading.total
        if not self.console.is_terminal and tenth != self._tenth and reading.rows < reading.total:
            self.say(f"{name}: {reading.rows:,} {facts}")
        self._tenth = tenth

    def _show(self, what: str, done: int, total: int | None, facts: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self.progress.add_task(what, total=total, facts=facts)
        self.progress.update(self._tasks[what], completed=done, total=total, facts=facts)
