"""Pre-train a small Llama with every method: equal tokens, each method's own best learning rate, several seeds.

The first seed walks the ladder of learning rates (`profiles.due`); the others run at the best one. All runs of a
method see the same text in the same order for a seed, so methods differ in their update rule alone.
"""

from __future__ import annotations

from typing import Any

from skimp.bench import runs
from skimp.bench.profiles import Profile, due
from skimp.bench.queue import Queue
from skimp.bench.runs import Job, Results
from skimp.bench.table import markdown
from skimp.bench.text import prepare

TABLE = "pretrain.md"


class Pretrain(Queue):
    """The benchmark in a folder of its own; the same call again goes on where it was stopped."""

    profile: Profile

    def __init__(self, profile: Profile, *rest: Any, **more: Any) -> None:
        super().__init__(profile, *rest, **more)
        self.text = prepare(self.work / f"model-{profile.name}", profile)
        self.results = Results(self.work, profile.digest(self.text))

    def due(self) -> list[Job]:
        """Runs that are known to be needed now, method by method."""
        found = []
        for method in self.methods:
            if not self.results.refused(method):
                losses = self.results.losses(method)
                found += [Job(method, lr, seed) for lr, seed in due(method, self.seeds, self.profile.rungs, losses)]
        return found

    def least(self) -> int:
        return len(self.methods) * (self.profile.rungs + len(self.seeds) - 1)

    def begin(self, job: Job) -> dict[str, Any] | None:
        return runs.run(self.profile, job, self.work, 1, self.started)

    def table(self) -> str:
        """The results as markdown, also written into the folder."""
        text = markdown(self.profile, self.methods, self.seeds, self.results, self.text, self.jobs)
        (self.work / TABLE).write_text(text, encoding="utf-8")
        return text
