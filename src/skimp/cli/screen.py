"""The screen of a run: sentences above, one line of progress below with time left and memory now / peak / budget."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from skimp.core.units import format_bytes
from skimp.run.loop import Progress as Step
from skimp.run.session import Voice


class Screen(Voice):
    """A `Voice` on a terminal; on a pipe, one line a step."""

    def __init__(self, console: Console, recipe: Any, quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        budget = recipe.budget.host
        self.budget = f" / {format_bytes(budget)}" if budget else ""
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[facts]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )
        self._task: dict[str, Any] = {}

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        if not self.quiet:
            self.progress.print(text) if self.console.is_terminal else print(text, flush=True)

    def reading(self, event: dict[str, Any]) -> None:
        self._show("tokenising", int(event.get("files_done", 0)), int(event.get("files", 1)),
                   f"{int(event.get('rows', 0)):,} rows, {int(event.get('tokens', 0)):,} tokens")

    def loading(self, done: int, total: int) -> None:
        self._show("loading weights", done, total, "tensors")

    def step(self, progress: Step) -> None:
        facts = (
            f"loss {progress.loss:.4f} · lr {progress.lr:.2e} · {progress.tokens_per_second:.0f} tok/s · memory "
            f"{format_bytes(progress.memory)} now, {format_bytes(progress.peak)} peak{self.budget}"
        )
        self._show("training", progress.step, progress.steps, facts)
        if not self.console.is_terminal and not self.quiet:
            print(f"step {progress.step}/{progress.steps}  {facts}", flush=True)

    def _show(self, what: str, done: int, total: int, facts: str) -> None:
        if what not in self._task:
            for task in self._task.values():
                self.progress.remove_task(task)
            self._task = {what: self.progress.add_task(what, total=total, facts=facts)}
        self.progress.update(self._task[what], completed=done, total=total, facts=facts)
