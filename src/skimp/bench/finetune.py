"""Fine-tune one small model with every adapter: equal steps, each method's own best learning rate, several seeds.

First the base: a tiny Llama is pre-trained for the purpose, once, or a real model is taken as it is. Then every method
trains on three tasks at once (`tasks`) through the ordinary `skimp train`. The loss on the dev part chooses the rate;
what is shown is how many answers to the test part are right, generated greedily.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

from skimp.bench import library, maths, runs, tasks
from skimp.bench.profiles import due
from skimp.bench.queue import Queue
from skimp.bench.runs import Job, Results
from skimp.bench.text import cut, documents, write_model
from skimp.bench.tuning import BASE, LADDER, Grown, Tuning
from skimp.bench.tuning_recipe import growing, recipe_of
from skimp.bench.tuning_table import markdown, rows_of
from skimp.core.child import child_environment

TABLE = "finetune.md"
#: Why nothing else is run.
NO_BASE = "the base could not be trained: "


class Finetune(Queue):
    """The benchmark in a folder of its own; the same call again goes on where it was stopped."""

    profile: Tuning

    def __init__(self, profile: Tuning, *rest: Any, **more: Any) -> None:
        super().__init__(profile, *rest, **more)
        # Named after what goes into them: another size never finds what was made for this one.
        self.items = self.work / f"items-{profile.name}-{mark_of(profile.sizes)}"
        self.ground = self.work / f"base-{profile.name}-{mark_of(profile.model, profile.sizes, profile.seq)}"
        found = tasks.write(self.items, profile.sizes)
        if isinstance(profile.model, Grown):
            found += self._text(profile.model)
        self.digest = profile.digest(found)
        self.results = Results(self.work, self.digest)

    @property
    def base(self) -> str:
        """What the recipes name as their model."""
        return self.profile.model if isinstance(self.profile.model, str) else str(self.ground / "model")

    def due(self) -> list[Job]:
        """Runs that are known to be needed now, method by method; the base before all others."""
        scored = [r for r in self.results.lines if r["method"] == BASE]
        if not scored or (self._grown_here() and not (Path(self.base) / "config.json").is_file()):
            return [] if any(r["status"] != "done" for r in scored) else [Job(BASE, 0.0, 0)]
        found = []
        for method in self.methods:
            if scored[-1]["status"] == "done" and not self.results.refused(method):
                pairs = due(
                    method,
                    self.seeds,
                    self.profile.rungs,
                    self.results.losses(method),
                    self.profile.rate(method),
                    LADDER,
                )
                found += [Job(method, lr, seed) for lr, seed in pairs]
        return found

    def least(self) -> int:
        return 1 + len(self.methods) * (self.profile.rungs + len(self.seeds) - 1)

    def begin(self, job: Job) -> dict[str, Any] | None:
        folder = self.work / "runs" / job.name
        if job.method == BASE:
            record = self._grow(job) if self._grown_here() else runs.untrained(self.profile, job)
            model = self.base
        else:
            recipe = recipe_of(self.profile, job.method, job.lr, job.seed, self.base, self.items, folder)
            record = runs.run(self.profile, job, self.work, 1, self.started, recipe)
            model = str(folder)
        if record is None or record["status"] != "done":
            return record
        folder.mkdir(parents=True, exist_ok=True)
        found = self._asked(model, folder)
        took = {"handed_bytes": handed_over(folder), "batch_tokens": self.profile.batch_tokens}
        return None if found is None else record | found | took

    def rows(self) -> list[dict[str, Any]]:
        """The table as data, see `tuning_table.rows_of`."""
        return rows_of(self.profile, self.methods, self.seeds, self.results, self.items)

    def table(self) -> str:
        """The table as markdown."""
        return markdown(self.profile, self.rows(), self.seeds, self.results, self.items, self.jobs)

    def _grown_here(self) -> bool:
        return isinstance(self.profile.model, Grown)

    def _text(self, grown: Grown) -> str:
        """The pre-training's text, tokenizer and config; its SHA-256."""
        sizes = self.profile.sizes
        texts = chain(
            cut(documents(code=False), grown.characters),
            library.code(grown.characters),
            library.described(4),
            maths.stories(sizes.largest, sizes.deepest, grown.stories, 1),
            maths.facts(sizes.largest, grown.rounds, 0),
        )
        return write_model(self.ground, texts, grown.vocab, grown.config(2 * self.profile.seq))

    def _grow(self, job: Job) -> dict[str, Any] | None:
        """Pre-train the base, or go on with it, and write it as a model of its own; one that is there is taken."""
        target, kept = Path(self.base), self.ground / "record.json"
        if target.is_dir():
            grown: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            return grown | {"wall_seconds": 0.0}
        folder = self.work / "runs" / job.name
        recipe = growing(self.profile, str(self.ground), self.ground / "text.jsonl", folder)
        record = runs.run(self.profile, job, self.work, 1, self.started, recipe)
        if record is None or record["status"] != "done":
            return record
        aside = target.with_name("model.part")
        shutil.rmtree(aside, ignore_errors=True)
        code, said = self._child("skimp.cli.main", "export", str(folder), "--to", "merged", "--output", str(aside))
        if code < 0 or code in (130, 143):
            return None
        if code:
            return record | {"status": "failed", "loss": None, "why": f"{NO_BASE}{said.strip()[-300:]}"}
        kept.write_text(json.dumps(record), encoding="utf-8")
        os.replace(aside, target)
        return record

    def _asked(self, model: str, folder: Path) -> dict[str, Any] | None:
        """The test part's questions, put to a model: right and asked by task. None when it was stopped from outside."""
        items = tasks.read(self.items / "test.jsonl")
        questions, out = folder / "questions.json", folder / "answers.json"
        questions.write_text(json.dumps([item.prompt for item in items]), encoding="utf-8")
        code, said = self._child("skimp.run.answers", model, str(questions), str(out), str(self.profile.answer))
        if code < 0 or code in (130, 143):
            return None
        if code:
            return {"status": "failed", "loss": None, "why": f"scoring: exit code {code}: {said.strip()[-300:]}"}
        return {"right": tasks.marked(items, json.loads(out.read_text(encoding="utf-8")))}

    def _child(self, module: str, *words: str) -> tuple[int, str]:
        env = child_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        argv = [sys.executable, "-m", module, *words]
        child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started(child)
        said = child.communicate()[0]
        return child.returncode, said


def mark_of(*facts: Any) -> str:
    """A few characters that stand for these facts."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def handed_over(folder: Path) -> int:
    """Bytes of what a finished run hands over: its newest checkpoint's weights, without the optimizer's states."""
    found = sorted(folder.glob("checkpoints/step-*/COMPLETE"))
    if not found:
        return 0
    return sum(p.stat().st_size for p in found[-1].parent.glob("*.safetensors") if not p.name.startswith("optimizer"))
