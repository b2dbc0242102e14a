"""The fine-tuning benchmark: what is due when, recipes of every method, what survives a kill, what the table says."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skimp.bench import finetune, runs, tasks, tuning
from skimp.bench.finetune import Finetune
from skimp.bench.runs import Job
from skimp.bench.tasks import Item
from skimp.bench.tuning import BASE, FULL, ON_CODES, TUNINGS, Grown, chosen, tunings_of
from skimp.bench.tuning_recipe import recipe_of
from skimp.bench.tuning_table import HEADER, accuracies
from skimp.cli.bench_table import screen_table
from skimp.core.child import child_environment
from skimp.core.errors import SkimpError
from skimp.core.registry import methods
from skimp.recipe import load_recipe
from skimp.report.methods_picture import methods_svg

SHORT = TUNINGS["short"]
EVERY = chosen([], TUNINGS["tiny"])


def test_every_adapter_that_is_registered_is_run_beside_full_fine_tuning() -> None:
    adapters = {name for name, facts in methods().items() if facts.kind == "adapter"}
    assert set(EVERY) == {FULL, *adapters, *ON_CODES}
    assert chosen(["dora", "full", "dora"], SHORT) == ["dora", "full"]
    assert set(chosen([], SHORT)) <= set(EVERY)
    assert len(chosen([], TUNINGS["smollm2"])) == 6
    with pytest.raises(SkimpError, match="lora"):
        chosen(["lorra"], SHORT)


def test_a_profile_may_be_two_and_an_unknown_one_says_the_nearest() -> None:
    assert [t.name for t in tunings_of("default")] == ["tiny", "smollm2"]
    assert tunings_of("short") == [SHORT]
    with pytest.raises(SkimpError, match="short"):
        tunings_of("shorts")


@pytest.mark.parametrize("name", ["short", "tiny", "smollm2"])
@pytest.mark.parametrize("method", EVERY)
def test_every_method_has_a_recipe_that_is_valid(method: str, name: str, tmp_path: Path) -> None:
    profile = TUNINGS[name]
    recipe = load_recipe(recipe_of(profile, method, 1e-3, 7, "model", tmp_path, tmp_path / "run"))
    assert recipe.train.seed == recipe.data.seed == 7
    assert recipe.rows_per_step * profile.seq == profile.batch_tokens
    assert profile.rate(method) in tuning.LADDER
    wanted = ON_CODES.get(method, (method, ""))
    assert (recipe.adapter is None) == (method == FULL)
    if recipe.adapter is not None:
        assert recipe.adapter.name == wanted[0]
    assert (recipe.model.weights is not None) == bool(wanted[1])


def test_results_of_other_items_models_or_steps_are_never_mixed_in() -> None:
    assert SHORT.digest("x") != SHORT.digest("y")
    assert len({t.digest("x") for t in TUNINGS.values()}) == len(TUNINGS)


def record(job: Job, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    right = {"maths": [6, 10], "code": [5, 10], "docs": [7, 10]}
    done = {"status": "done", "right": right, "trained": 1000, "planned_peak_bytes": 9_000_000, "peak_bytes": 9_000_000}
    took = {"seconds_per_step": 0.5, "batch_tokens": 1024, "handed_bytes": 4096, "wall_seconds": 3.0}
    about = {"method": job.method, "lr": job.lr, "seed": job.seed, "loss": loss, "date": "2026-01-02"}
    return {**about, **done, **took, "versions": {"python": "3.11"}, **more}


def answered(item: Item) -> dict[str, Any]:
    return {"task": item.task, "prompt": item.prompt, "completion": item.completion}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A work folder in which nothing has to be read from the library."""

    def write(folder: Path, sizes: Any) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        items = [Item(task, f"{task}?", " 1") for task in tasks.MARKS]
        for part in tasks.PARTS:
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(answered(i)) + "\n" for i in items))
        (folder / "items.sha256").write_text("0" * 64)
        return "0" * 64

    monkeypatch.setattr(tasks, "write", write)
    monkeypatch.setattr(finetune, "write_model", lambda folder, *_: folder.mkdir(parents=True, exist_ok=True) or "t")
    return tmp_path


def test_the_base_comes_first_and_then_rates_are_walked(prepared: Path) -> None:
    bench = Finetune(SHORT, ["full", "lora"], [0, 1], prepared, 1)
    assert bench.due() == [Job(BASE, 0.0, 0)]
    bench.results.add(record(Job(BASE, 0.0, 0), 3.0))
    assert bench.due() == [Job(BASE, 0.0, 0)], "its record without its weights is no base"
    model = Path(bench.base)
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    first = bench.due()
    assert [job.method for job in first] == ["full", "full", "lora", "lora"]
    assert {job.seed for job in first} == {0}
    for job in first:
        bench.results.add(record(job, abs(math.log(job.lr / 1e-2)) + 1))
    second = bench.due()
    assert [(job.method, job.seed) for job in second] == [("full", 1), ("lora", 1)]
    assert second[1].lr == 1e-2
    for job in second:
        bench.results.add(record(job))
    assert bench.due() == []
    assert Finetune(SHORT, ["full", "lora"], [0, 1], prepared, 2).due() == [], "another call goes on with the same"


def test_without_a_base_nothing_else_is_run_and_the_table_says_why(prepared: Path) -> None:
    bench = Finetune(SHORT, ["full"], [0], prepared, 1)
    bench.results.add(record(Job(BASE, 0.0, 0), None, status="diverged", why="no finite loss"))
    assert bench.due() == []
    assert "| the base, untuned | no finite loss |" in bench.table()


def test_the_table_shows_errors_refusals_and_what_each_took(prepared: Path) -> None:
    bench = Finetune(SHORT, ["full", "lora", "qst", "dora"], [0, 1], prepared, 1)
    bench.results.add(record(Job(BASE, 0.0, 0), 3.0, right={"maths": [0, 10], "code": [1, 10], "docs": [2, 10]}))
    for lr, seed, loss, maths in ((1e-3, 0, 1.0, 6), (3e-3, 0, 2.0, 10), (1e-3, 1, 1.1, 8)):
        right = {"maths": [maths, 10], "code": [5, 10], "docs": [7, 10]}
        bench.results.add(record(Job("full", lr, seed), loss, right=right))
    bench.results.add(record(Job("lora", 1e-2, 0)))
    bench.results.add(record(Job("qst", 1e-2, 0), None, status="refused", why="no | such\nheads"))
    text = bench.table()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2].startswith("| most frequent answer | 100.0 | 100.0 | 100.0 | 100.0 |")
    assert rows[3].startswith("| the base, untuned | 0.0 ± 0.0 | 10.0 ± 9.5 | 20.0 ± 12.6 | 10.0 ± 5.3 |")
    assert rows[4].startswith("| full | 70.0 ± 10.0 | 50.0 ± 0.0 | 70.0 ± 0.0 | 63.3 ± 3.3 | 0.001 (edge) | 1,000 |")
    assert rows[4].endswith("| 9.00 MB | 9.00 MB | 2,048 | 4.10 kB |")
    assert rows[5].startswith("| lora (1 of 2 seeds) | 60.0 ± 15.5 |")
    assert rows[6].startswith("| qst | no / such |")
    assert rows[7].startswith("| dora | not run yet |")
    assert all(row.count("|") == len(HEADER) + 1 for row in rows)
    assert "2026-01-02" in text
    drawn = methods_svg(bench.rows(), "title")
    assert drawn.count("<circle") == 2
    assert drawn.count('class="u"') == 2
    assert "63.3 ± 3.3 %" in drawn
    assert screen_table(bench.rows(), "short").row_count == 6


def test_standard_errors_are_those_of_the_seeds_or_of_a_share() -> None:
    job = Job("lora", 1e-3, 0)
    several = [
        record(job, right={"maths": [n, 10], "code": [5, 10], "docs": [m, 10]}) for n, m in ((4, 6), (6, 4), (8, 2))
    ]
    found = accuracies(several)
    assert found["accuracy"]["maths"] == pytest.approx(0.6)
    assert found["error"]["maths"] == pytest.approx(0.2 / math.sqrt(3))
    assert found["error"]["mean"] == pytest.approx(0.0), "errors of the mean are of the means, not of the tasks"
    one = accuracies(several[:1])["error"]
    assert one["maths"] == pytest.approx(math.sqrt(0.4 * 0.6 / 10))
    assert one["mean"] == pytest.approx(math.sqrt((0.24 + 0.25 + 0.24) / 10) / 3)


def test_scoring_that_fails_is_said_and_tried_anew(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Finetune(TUNINGS["smollm2"], ["full"], [0], prepared, 1)
    answers = iter([(1, "boom"), (-9, ""), (0, "")])
    monkeypatch.setattr(Finetune, "_child", lambda self, *words: next(answers))
    job = Job(BASE, 0.0, 0)
    failed = bench.begin(job)
    assert failed is not None
    assert (failed["status"], failed["why"]) == ("failed", "scoring: exit code 1: boom")
    assert bench.begin(job) is None, "killed from outside: no record"
    (prepared / "runs" / job.name / "answers.json").write_text(json.dumps([" 1", "2", "1\nx"]))
    done = bench.begin(job)
    assert done is not None
    assert done["right"] == {"maths": (1, 1), "code": (0, 1), "docs": (1, 1)}
    bench.results.add(failed)
    assert Finetune(TUNINGS["smollm2"], ["full"], [0], prepared, 1).due() == [job]


def command(output: Path) -> list[str]:
    argv = [sys.executable, "-m", "skimp.cli.main", "bench", "finetune", "--profile", "seconds", "--methods", "lora"]
    return [*argv, "--jobs", "1", "--markdown", "--output", str(output)]


@pytest.mark.slow
def test_a_killed_benchmark_ends_with_the_table_of_one_that_was_not(tmp_path: Path) -> None:
    env = child_environment(OMP_NUM_THREADS="1")
    first = subprocess.Popen(command(tmp_path / "bench"), env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    lines = tmp_path / "bench" / "results.jsonl"
    until = time.monotonic() + 250
    while not lines.is_file() and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = lines.read_bytes()
    second = subprocess.run(command(tmp_path / "bench"), env=env, capture_output=True, text=True, check=True)
    assert lines.read_bytes().startswith(kept), "what was done is not done again"
    for items in (tmp_path / "bench").glob("items-*"):  # the same anyway, and slow to read
        shutil.copytree(items, tmp_path / "other" / items.name)
    whole = subprocess.run(command(tmp_path / "other"), env=env, capture_output=True, text=True, check=True)

    def same(text: str) -> list[list[str]]:
        """All but the clock's column."""
        clock = 1 + HEADER.index("tokens/s")
        rows = [row.split("|") for row in text.splitlines() if row.startswith("|")]
        return [row[:clock] + row[clock + 1 :] for row in rows]

    assert same(second.stdout) == same(whole.stdout)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    others = [json.loads(line) for line in (tmp_path / "other" / lines.name).read_text().splitlines()]
    assert [r["loss"] for r in found] == [r["loss"] for r in others], "to the bit"
    assert [r["method"] for r in found] == [BASE, "lora"]
    for one in found[1:]:
        assert one["planned_peak_bytes"] == one["peak_bytes"]
        assert one["handed_bytes"] > 4 * one["trained"]
        assert set(one["right"]) == set(tasks.MARKS)
    assert isinstance(TUNINGS["seconds"].model, Grown)
    for name in ("finetune.md", "finetune-seconds.svg"):
        assert (tmp_path / "bench" / name).is_file()
    assert not any((tmp_path / "bench" / "runs").iterdir())
    assert lines.name == runs.RESULTS
