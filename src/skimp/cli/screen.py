"""The screen of a run: sentences above, a line of progress below with time left and memory against budget."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from skimp.cli.show import print_plan
from skimp.core.units import format_bytes, format_seconds
from skimp.run.voice import Progress as Step
from skimp.run.voice import Voice

#: Columns that a step's whole line takes.
NARROW = 112


class Screen(Voice):
    """A `Voice` on a terminal; on a pipe, one line a step."""

    def __init__(self, console: Console, recipe: Any, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        budget = recipe.budget.host
        self.budget = f" of {format_bytes(budget)}" if budget else ""
        self.progress = Progress(
            TextColumn("{task.description} {task.completed}/{task.total}"),
            BarColumn(bar_width=12),
            # Wraps in a narrow window, where rich would cut the line and the memory with it.
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=False)),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: dict[str, Any] = {}
        self._rate: float | None = None

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text), soft_wrap=True)

    def planned(self, plan: Any) -> None:
        if not self.quiet:
            print_plan(plan, self.console)

    def reading(self, event: dict[str, Any]) -> None:
        facts = f"{int(event.get('rows', 0)):,} rows, {int(event.get('tokens', 0)):,} tokens"
        self._show("tokenising, file", int(event.get("files_done", 0)), int(event.get("files", 1)), facts)

    def loading(self, done: int, total: int) -> None:
        self._show("loading weights", done, total, "tensors")

    def step(self, progress: Step) -> None:
        # In a narrow window memory takes a line of its own, instead of a break between a number and its unit.
        apart = "\n" if self.console.is_terminal and self.console.width < NARROW else " · "
        facts = (
            f"loss {progress.loss:.4f} · {progress.tokens_per_second:,.0f} tok/s · "
            f"{self._left(progress)} left{apart}"
            f"memory {format_bytes(progress.memory)}, peak {format_bytes(progress.peak)}{self.budget}"
        )
        self._show("step", progress.step, progress.steps, facts)
        if not self.console.is_terminal:
            self.say(f"step {progress.step}/{progress.steps}  lr {progress.lr:.2e} · {facts}")

    def _left(self, progress: Step) -> str:
        """Time left, from a running mean of seconds a step: the first is slow, a shared machine uneven."""
        now = progress.seconds
        self._rate = now if self._rate is None else 0.8 * self._rate + 0.2 * now
        return format_seconds(self._rate * (progress.steps - progress.step))

    def _show(self, what: str, done: int, total: int, facts: str) -> None:
        if what not in self._task:
            for task in self._task.values():
                self.progress.remove_task(task)
            self._task = {what: self.progress.add_task(what, total=total, facts=facts)}
        self.progress.update(self._task[what], completed=done, total=total, facts=facts)
