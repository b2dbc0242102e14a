"""Start the child that tokenises, listen to it, and turn its end into a message when it ends badly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from skimp.core.child import child_environment
from skimp.core.errors import DataError, ModelError, SkimpError

Progress = Callable[[dict[str, Any]], None]


class Child:
    """A running `python -m skimp.data.tokenise`; a context manager that leaves no process behind."""

    def __init__(self, job: dict[str, Any]) -> None:
        environment = child_environment()
        environment.setdefault("TOKENIZERS_PARALLELISM", "true")
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - read after the child's end
        # Own session: Ctrl-C stops the training loop at a step boundary, which must not lose its data
        # meanwhile.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "skimp.data.tokenise"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._stdin.write(json.dumps(job).encode())
            self._stdin.close()
        except BrokenPipeError:
            raise self.death() from None

    @property
    def _stdin(self) -> IO[bytes]:
        if self.process.stdin is None:
            raise RuntimeError("the child was started without a pipe")
        return self.process.stdin

    @property
    def out(self) -> IO[bytes]:
        if self.process.stdout is None:
            raise RuntimeError("the child was started without a pipe")
        return self.process.stdout

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End the child, if it still runs, and wait for it."""
        if not self.out.closed:
            self.out.close()  # first: a child that waits for room in the pipe could not end otherwise
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if not self._errors.closed:
            self._errors.close()

    def death(self) -> DataError:
        """Why the child ended without saying so itself."""
        code = self.process.wait()
        self._errors.seek(0)
        said = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else str(-code)
            memory = -code == signal.SIGKILL
            return DataError(
                "the process that tokenises",
                f"was ended by {name}" + (", most likely because memory ran out" if memory else ""),
                "the kernel ends a process when the machine or its memory group is full" if memory else "",
                [
                    "close other programs or allow this one more memory",
                    "start again: nothing half-done was kept",
                ],
            )
        return DataError(
            "the process that tokenises",
            f"ended with code {code}" + (f": {said[-1]}" if said else " and said nothing"),
            " | ".join(line.strip() for line in said[-6:-1]),
            "start again; if it happens again, report it with the lines above",
        )


def raise_reported(record: dict[str, Any]) -> None:
    """Raise here the error that the child reported."""
    kinds: dict[str, type[SkimpError]] = {"ModelError": ModelError, "DataError": DataError}
    raise kinds[record["kind"]](record["asked"], record["found"], record["why"], record["instead"])


def run_to_end(job: dict[str, Any], progress: Progress | None = None) -> None:
    """Run a job that writes stores, showing each line of progress.

    Raises:
        DataError, ModelError: what the child reported, or how it died.
    """
    with Child(job) as child:
        for line in child.out:
            record = json.loads(line)
            if record["event"] == "error":
                raise_reported(record)
            if record["event"] == "done":
                return
            if progress is not None:
                progress(record)
        raise child.death()
