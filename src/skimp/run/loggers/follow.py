"""The child's work: every new row to every logger, once, and where each of them is, kept for the next process."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from skimp.run.loggers.tail import Tail
from skimp.run.loggers.values import of_evaluation, of_step
from skimp.run.loggers.writers import Writer

#: In the run's folder: per logger, the run it continues and the last steps it was told.
STATE = "loggers.json"


class Follower:
    """Reads a run's rows and tells its loggers.

    Args:
        folder: the run's.
        writers: opened loggers by name.
        limits: `planned` and `budget` bytes.
        lost: called with a logger's name and why, when it fails; it is told nothing more by this process. Where it
            stopped is kept, so that a resumed run makes up for it.
    """

    def __init__(
        self,
        folder: Path,
        writers: Mapping[str, Writer],
        limits: Mapping[str, int | None],
        lost: Callable[[str, str], None],
    ) -> None:
        self.folder, self.writers, self.limits, self.lost = folder, dict(writers), limits, lost
        self.state = read_state(folder)
        for name, writer in writers.items():
            self.state.setdefault(name, {"step": 0, "eval": -1})["run"] = writer.run
        self._steps, self._evals = Tail(folder / "metrics.jsonl"), Tail(folder / "evals.jsonl")
        self._waiting: list[dict[str, Any]] = []

    def begin(self) -> None:
        """After the run's files were cut back to where it goes on from: loggers that can, go back too."""
        rows, _ = Tail(self.folder / "metrics.jsonl").read()
        self._back(rows[-1]["step"] if rows else 0)

    def _back(self, last: int) -> None:
        for name, writer in list(self.writers.items()):
            state = self.state[name]
            if writer.can_rewind and max(state["step"], state["eval"]) > last:
                self._safely(name, partial(writer.rewind, last))
                state["step"], state["eval"] = min(state["step"], last), min(state["eval"], last)

    @property
    def began(self) -> bool:
        """Whether any logger was told of a step, by this process or an earlier one."""
        return any(state["step"] for state in self.state.values())

    def poll(self) -> None:
        """Tell every logger what is new."""
        (steps, cut), (evals, cut_too) = self._steps.read(), self._evals.read()
        if cut or cut_too:
            # The run went back to a checkpoint while this process read on: from the start, both files.
            self._back(0)
            self._steps, self._evals = Tail(self._steps.path), Tail(self._evals.path)
            (steps, _), (evals, _) = self._steps.read(), self._evals.read()
            self._waiting = []
        evals = [*self._waiting, *evals]
        # The loss before training waits for the first step: a run that ends before it leaves nothing behind.
        self._waiting = [] if steps or self.began else evals
        if self._waiting or not (steps or evals):
            return
        for name, writer in list(self.writers.items()):
            self._safely(name, partial(self._tell, name, writer, steps, evals))
        self.save()

    def _tell(self, name: str, writer: Writer, steps: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
        state = self.state[name]
        for row in evals:
            if row["step"] == 0 and state["eval"] < 0:
                writer.write(0, of_evaluation(row))
                state["eval"] = 0
        for row in steps:
            if row["step"] > state["step"]:
                writer.write(row["step"], of_step(row, self.limits))
                state["step"] = row["step"]
        for row in evals:
            if row["step"] > state["eval"]:
                writer.write(row["step"], of_evaluation(row))
                state["eval"] = row["step"]
        writer.flush()

    def _safely(self, name: str, action: Callable[[], None]) -> None:
        """A logger may raise anything, of any package below it: it is said, and the others go on."""
        try:
            action()
        except Exception as error:
            self.writers.pop(name, None)
            self.lost(name, f"{type(error).__name__}: {first_line(error)}")

    def close(self) -> None:
        """The last rows, then the summary; a run that never began leaves nothing."""
        self.poll()
        for name, writer in list(self.writers.items()):
            if self.began:
                self._safely(name, partial(writer.close, _summary(self.folder)))
            else:
                self._safely(name, writer.discard)
        if self.began:
            self.save()

    def save(self) -> None:
        path = self.folder / STATE
        aside = path.with_name(f"{STATE}.tmp-{os.getpid()}")
        aside.write_text(json.dumps(self.state, indent=1))
        os.replace(aside, path)


def read_state(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier processes kept; nothing where there is no such file, or one that cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / STATE).read_bytes())
        if isinstance(found, dict):
            return {name: {"step": 0, "eval": -1, **part} for name, part in found.items() if isinstance(part, dict)}
    return {}


def _summary(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((folder / "summary.json").read_bytes()))
    return {}


def first_line(error: BaseException) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
