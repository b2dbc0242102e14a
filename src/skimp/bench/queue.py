"""Runs handed out to a few places at a time, until nothing is due; what was stopped goes on with the next call."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import Any

from skimp.bench import runs
from skimp.bench.runs import Job, Results

Show = Callable[[int, int, float, dict[str, Any] | None], None]


class Queue(ABC):
    """A benchmark in a folder of its own; the same call again goes on where it was stopped.

    Args:
        profile: whose `name` stands in the records. methods, seeds: what to run.
        work: the folder: results.jsonl, the table, and what runs at the moment.
        jobs: runs at a time, one thread each.
        show: called with (runs done, runs expected, seconds left) and the last record, after each run.
    """

    results: Results

    def __init__(
        self,
        profile: Any,
        methods: Sequence[str],
        seeds: Sequence[int],
        work: Path,
        jobs: int,
        show: Show | None = None,
    ) -> None:
        self.profile, self.jobs = profile, jobs
        self.methods, self.seeds = list(methods), list(seeds)
        # Absolute: the runs' recipes name folders in it.
        self.work, self.show = work.resolve(), show or (lambda *_: None)
        self.work.mkdir(parents=True, exist_ok=True)
        self._children: list[Any] = []
        self._lock, self._stopped = Lock(), False
        self._walls: list[float] = []
        self._kills: Counter[Job] = Counter()

    @abstractmethod
    def due(self) -> list[Job]:
        """Runs that are known to be needed now."""

    @abstractmethod
    def least(self) -> int:
        """Runs that there will be at least."""

    @abstractmethod
    def begin(self, job: Job) -> dict[str, Any] | None:
        """Run a job to its end; its record, or None when it was stopped from outside."""

    def run(self, minutes: float | None = None) -> bool:
        """Run what is due, until nothing is, or until so many minutes have passed (runs that began are finished).

        Returns:
            Whether everything is done.

        Raises:
            SkimpError: another process goes on running in the folder.
        """
        runs.wait_for_orphans(self.work)
        until = None if minutes is None else time.monotonic() + 60 * minutes
        flying: dict[Future[dict[str, Any] | None], Job] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while True:
                    # A run is handed out when there is a place for it: what comes later may depend on it.
                    waiting = [job for job in self.due() if job not in flying.values()]
                    on_time = until is None or time.monotonic() < until
                    while waiting and len(flying) < self.jobs and on_time and not self._stopped:
                        job = waiting.pop(0)
                        flying[pool.submit(self.begin, job)] = job
                    if not flying:
                        return not waiting
                    done, _ = wait(flying, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._finished(flying.pop(future), future.result())
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Ask every run to save and end; the next call goes on with them."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                if child.poll() is None:
                    child.terminate()

    def started(self, child: Any) -> None:
        """A child process was started: it is stopped with the others."""
        with self._lock:
            self._children = [c for c in self._children if c.poll() is None] + [child]
            if self._stopped:
                child.terminate()

    def _finished(self, job: Job, record: dict[str, Any] | None) -> None:
        if record is None:
            self._kills[job] += 1
            if self._stopped or self._kills[job] < runs.KILLS:
                return
            record = runs.killed(self.profile, job)
        self.results.add(record)
        runs.clean(self.work, job)
        self._walls.append(record["wall_seconds"])
        done = len(self.results.lines)
        expected = max(done + len(self.due()), self.least())
        left = (expected - done) * sum(self._walls) / len(self._walls) / self.jobs
        self.show(done, expected, left, record)


def default_jobs() -> int:
    """Runs at a time: one a core of those this process may use, four at most."""
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
