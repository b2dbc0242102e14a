"""The training process's side: refuse what cannot work before anything loads, start the child, hear it, let it end."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skimp.core.child import child_environment
from skimp.core.errors import RecipeError
from skimp.run.voice import Progress, Voice

#: A logger that asks a server who you are gets this long to open, and this long to send the rest at the end.
OPENING, CLOSING = 120.0, 120.0


def check_installed(loggers: Mapping[str, Any]) -> None:
    """Every logger's package must be here, before a model is loaded. Nothing is imported.

    Raises:
        RecipeError: one is missing; with the command that installs it.
    """
    for name in loggers:
        found = importlib.util.find_spec(name)
        # A folder `wandb` in the working directory, which wandb makes itself, looks like a package without an origin.
        if found is None or found.origin is None:
            raise RecipeError(
                f"log: {name}",
                f"the package {name} is not installed",
                "",
                [f"pip install 'skimp[{name}]'", f"log.{name}=false: metrics.jsonl has it all"],
            )


@contextmanager
def following(recipe: Any, folder: Path, voice: Voice) -> Iterator[Loggers | None]:
    """The recipe's loggers, from before the weights are loaded until the last row is told; None without any.

    Raises:
        RecipeError: a logger could not be opened: not logged in, no such Space, a folder that cannot be written.
    """
    wanted = recipe.log.wanted
    if not wanted:
        yield None
        return
    loggers = Loggers(folder, wanted, recipe.as_dict(), voice)
    try:
        loggers.wait_until_open()
        yield loggers
    finally:
        loggers.close()


def shown(voice: Voice, loggers: Loggers | None) -> Callable[[Progress], None]:
    """What a loop calls after every step: the screen, then a look at what the loggers say."""
    if loggers is None:
        return voice.step

    def show(progress: Progress) -> None:
        voice.step(progress)
        loggers.listen()

    return show


class Loggers:
    """The child process and what it says.

    Args:
        folder: the run's.
        wanted: options by logger.
        config: plain values of the run, for loggers that keep them.
        voice: told what the child says.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, Any], config: dict[str, Any], voice: Voice) -> None:
        self.folder, self.wanted, self.voice = folder, wanted, voice
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the child has ended
        self._child = subprocess.Popen(
            [sys.executable, "-m", "skimp.run.loggers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C asks the loop to stop; the child still has its last rows to tell
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._in, self._out = self._child.stdin, self._child.stdout
        os.set_blocking(self._out.fileno(), False)
        self._rest = b""
        self._ended = self._closing = self._out_ended = False
        self._send({"folder": str(folder), "name": folder.resolve().name, "loggers": wanted, "config": config})

    def _send(self, value: Mapping[str, Any]) -> None:
        try:
            self._in.write(json.dumps(value).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            self._gone()

    def _events(self, seconds: float = 0.0) -> list[dict[str, Any]]:
        """What the child has said by now; waits so long for the first word."""
        if self._out_ended or not select.select([self._out], [], [], seconds)[0]:
            return []
        new = self._out.read()
        if new == b"":
            self._out_ended = True
            self._gone()
            return []
        self._rest += new or b""
        *whole, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in whole]

    def wait_until_open(self) -> None:
        """Until every logger is open.

        Raises:
            RecipeError: one is not.
        """
        until = time.monotonic() + OPENING
        while time.monotonic() < until and not self._ended:
            for event in self._events(1.0):
                if event["event"] == "failed":
                    self._ended = True
                    raise _cannot_open(event["name"], event["why"])
                if event["event"] == "opened":
                    self.voice.say(f"{event['name']}: {event['words']}")
                if event["event"] == "ready":
                    return
        names = ", ".join(self.wanted)
        raise _cannot_open(names, self._last_words() if self._ended else f"no answer within {OPENING:.0f} s")

    def begin(self, planned: int | None, budget: int | None) -> None:
        """The run's files are as they will be continued: the child may read them."""
        self._send({"planned": planned, "budget": budget})

    def listen(self, seconds: float = 0.0) -> None:
        """Pass on what the child said since; waits so long for a first word, in the loop not at all."""
        for event in self._events(seconds):
            if event["event"] == "lost":
                self.voice.say(
                    f"{event['name']} failed and is told nothing more: {event['why']}; training goes on, "
                    "metrics.jsonl is complete, and a resumed run makes up for it"
                )

    def _gone(self) -> None:
        """The child ended by itself."""
        if not self._ended and not self._closing:
            self._ended = True
            self.voice.say(
                f"the loggers' process ended: {self._last_words()}; training goes on and metrics.jsonl is complete"
            )

    def _last_words(self) -> str:
        self._child.poll()
        self._errors.seek(0)
        said = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return said[-1].strip() if said else f"code {self._child.returncode}"

    def close(self) -> None:
        """Let the child tell the last rows and end; it is ended where it does not."""
        self._closing = True
        with suppress(BrokenPipeError):
            self._in.close()
        until = time.monotonic() + CLOSING
        try:
            while self._child.poll() is None and time.monotonic() < until:
                self.listen(0.2)
                if self._out_ended:
                    time.sleep(0.05)  # it has said its last word and is about to end
            self.listen()
        finally:
            names = ", ".join(self.wanted)
            if self._child.poll() is None:
                self.voice.say(f"{names} did not end within {CLOSING:.0f} s; metrics.jsonl is complete")
                self._child.kill()
            elif self._child.returncode and not self._ended:
                self.voice.say(f"{names} did not end well: {self._last_words()}; metrics.jsonl is complete")
            self._child.wait()
            self._out.close()
            self._errors.close()


def _cannot_open(name: str, why: str) -> RecipeError:
    ways = [f"log.{part}=false: metrics.jsonl has it all" for part in name.split(", ")]
    if "wandb" in name:
        ways = ["wandb login", "log.wandb.mode=offline: written here, sent later by wandb sync", *ways]
    return RecipeError(f"log: {name}", why, "it could not be opened, and nothing has been trained yet", ways)
