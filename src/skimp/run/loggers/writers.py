"""One class a logger: open, write named values at a step, start over from a step, close. Imported by the child alone.

Each package is imported in its class's constructor, so that nobody pays for another's.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Writer(Protocol):
    """What the child asks of a logger.

    Attributes:
        words: where a person finds it.
        run: what a resumed process continues by; plain text.
        can_rewind: steps written twice replace each other; else what was written once stays.
    """

    words: str
    run: str
    can_rewind: bool

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...

    def discard(self) -> None: ...


class TensorBoardWriter:
    """Event files, by TensorBoard's own writer: torch's would import torch, 200 MB, for the same bytes."""

    can_rewind = True

    def __init__(self, folder: Path, name: str, run: str | None, options: Mapping[str, Any], config: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries, self._make = event_pb2, summary_pb2, EventFileWriter
        self.folder = Path(options["dir"]) if options["dir"] is not None else folder / "tensorboard"
        self._made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = name
        self.words = f"tensorboard --logdir {self.folder}"
        self._file: Any = None  # opened with the first event: a run that ends before it leaves nothing

    def _add(self, **event: Any) -> None:
        if self._file is None:
            self._file = self._make(str(self.folder))
        self._file.add_event(self._events.Event(wall_time=time.time(), **event))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        found = [value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._add(step=step, summary=self._summaries.Summary(value=found))

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def rewind(self, step: int) -> None:
        """Tell readers that what was written above `step`, in earlier files too, is void."""
        log = self._events.SessionLog
        self._add(step=step + 1, session_log=log(status=log.START))

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        if self._made and self._file is None:
            self.folder.rmdir()


class TrackioWriter:
    """A run in Trackio's database. A step written once stays as it was."""

    can_rewind = False

    def __init__(self, folder: Path, name: str, run: str | None, options: Mapping[str, Any], config: Any) -> None:
        import trackio

        self._trackio: Any = trackio
        self.project = options["project"]
        # Two folders may have the same name; a run that is continued must be its own.
        self.run = run or f"{options['name'] or name}-{secrets.token_hex(3)}"
        place = options["space"] or f'trackio show --project "{self.project}"'
        self.words = f"{place}, run {self.run}"
        self._begin = {"project": self.project, "name": self.run, "space_id": options["space"], "config": config}
        self._on = False
        if options["space"] is not None:
            self._open()  # a Space that cannot be reached is found out before training

    def _open(self) -> None:
        if not self._on:
            quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
            self._trackio.init(resume="allow", **self._begin, **quiet)
            self._on = True

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._open()
        self._trackio.log(dict(values), step=step)

    def flush(self) -> None:
        """Trackio sends by itself, in a thread."""

    def rewind(self, step: int) -> None:
        """Nothing written is taken back."""

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._on:
            self._trackio.finish()

    def discard(self) -> None:
        self.close({})


class WandbWriter:
    """A run of Weights & Biases. Its own step only rises, so the optimizer step is a value and the axis of all others;
    a step written once stays as it was."""

    can_rewind = False

    def __init__(self, folder: Path, name: str, run: str | None, options: Mapping[str, Any], config: Any) -> None:
        import wandb

        self.run = run or secrets.token_hex(4)
        offline = options["mode"] == "offline"
        self._folder = folder / "wandb"
        self._made = not self._folder.exists()
        os.environ.setdefault("WANDB_SILENT", "true")
        self._run = wandb.init(
            project=options["project"],
            entity=options["entity"],
            name=options["name"] or name,
            mode=options["mode"],
            id=self.run,
            # Offline, nobody can be asked what is there: `wandb sync` joins runs of one id.
            resume=None if offline else "allow",
            dir=str(folder),
            config=config,
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.words = f"wandb sync {self._folder}/offline-run-*" if offline else str(self._run.url)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def flush(self) -> None:
        """Sent by its own process."""

    def rewind(self, step: int) -> None:
        """Nothing written is taken back."""

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, (int, float, str))})
        self._run.finish()

    def discard(self) -> None:
        self._run.finish(exit_code=1)
        if self._made:
            shutil.rmtree(self._folder, ignore_errors=True)


WRITERS: dict[str, Any] = {"tensorboard": TensorBoardWriter, "trackio": TrackioWriter, "wandb": WandbWriter}
