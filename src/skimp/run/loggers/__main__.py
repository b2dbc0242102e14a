"""`python -m skimp.run.loggers`: the child. It lives as long as its standard input is open.

In: one line of JSON with the job, one more when training begins. Out: one line of JSON an event: "opened" a logger,
"failed" to open one, "ready", "lost" one, "closed". Whatever the loggers print themselves goes to standard error.
"""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from skimp.run.loggers.follow import Follower, first_line, read_state
from skimp.run.loggers.writers import WRITERS, Writer

#: Seconds between two looks at the files.
PULSE = 1.0


def main() -> int:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(event: str, **facts: Any) -> None:
        try:
            channel.write(json.dumps({"event": event, **facts}) + "\n")
            channel.flush()
        except BrokenPipeError:  # the run is gone; what it wrote is still told to its loggers
            sys.stderr.write(f"{event} {facts}\n")

    job = json.loads(sys.stdin.readline())
    folder = Path(job["folder"])
    writers: dict[str, Writer] = {}
    for name, options in job["loggers"].items():
        run = read_state(folder).get(name, {}).get("run")
        try:
            writers[name] = WRITERS[name](folder, job["name"], run, options, job["config"])
        except Exception as error:
            for writer in writers.values():
                with suppress(Exception):
                    writer.discard()
            tell("failed", name=name, why=f"{type(error).__name__}: {first_line(error)}")
            return 1
        tell("opened", name=name, words=writers[name].words)
    tell("ready")
    begun = sys.stdin.readline()
    limits = json.loads(begun) if begun else {}
    follower = Follower(folder, writers, limits, lambda name, why: tell("lost", name=name, why=why))
    if begun:
        follower.begin()
        while not select.select([sys.stdin], [], [], PULSE)[0]:
            follower.poll()
    follower.close()
    tell("closed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
