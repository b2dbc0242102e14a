"""The pre-training benchmark: how learning rates are walked, what survives a kill, what the table says."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.bench import pretrain, runs
from skimp.bench.pretrain import Pretrain
from skimp.bench.profiles import LADDER, PROFILES, changes, chosen, due, profile_of
from skimp.bench.runs import Job, Results, recipe_of
from skimp.bench.table import markdown
from skimp.bench.text import documents
from skimp.core.child import child_environment
from skimp.core.errors import SkimpError
from skimp.core.registry import methods
from skimp.recipe import load_recipe
from skimp.run.folder import RUN, claim

TINY = PROFILES["tiny"]


def walk(loss_of: dict[float, float], method: str = "adamw", seeds: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """All (rate, seed) pairs of a method in the order they are asked for."""
    losses: dict[tuple[float, int], float] = {}
    order = []
    while wanted := due(method, seeds, 3, losses):
        order.append(wanted)
        losses |= {(rate, seed): loss_of[rate] for rate, seed in wanted}
    return order


def test_three_neighbours_then_the_other_seeds_at_the_best() -> None:
    order = walk({rate: abs(math.log(rate / 3e-3)) for rate in LADDER})
    assert order == [[(1e-3, 0), (3e-3, 0), (1e-2, 0)], [(3e-3, 1), (3e-3, 2)]]


def test_a_best_at_the_edge_is_walked_past() -> None:
    order = walk({rate: abs(math.log(rate / 3e-4)) for rate in LADDER})
    assert order == [[(1e-3, 0), (3e-3, 0), (1e-2, 0)], [(3e-4, 0)], [(1e-4, 0)], [(3e-4, 1), (3e-4, 2)]]
    up = walk(dict(zip(LADDER, range(len(LADDER), 0, -1), strict=True)))
    assert up[-1] == [(LADDER[-1], 1), (LADDER[-1], 2)]


def test_runs_that_diverge_are_infinite_and_never_best() -> None:
    order = walk({rate: math.inf if rate > 2e-3 else rate for rate in LADDER}, seeds=(4,))
    assert order[0] == [(1e-3, 4), (3e-3, 4), (1e-2, 4)]
    assert order[-1] == [(1e-4, 4)]
    assert due("adamw", (0,), 3, {(rate, 0): math.inf for rate in LADDER}) == []


def test_methods_are_those_that_are_registered() -> None:
    rules = {name for name, facts in methods().items() if facts.kind == "update rule"}
    assert set(chosen([], TINY)) == rules
    assert chosen(["lion", "lisa", "lion"], TINY) == ["lion", "lisa"]
    with pytest.raises(SkimpError, match="adamw"):
        chosen(["adanw"], TINY)
    with pytest.raises(SkimpError, match="tiny"):
        profile_of("tinny")


@pytest.mark.parametrize("method", [*chosen([], TINY), "lisa", "owlore", "badam"])
def test_every_method_has_a_recipe_that_is_valid(method: str, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_of(TINY, Job(method, 1e-3, 7), tmp_path))
    assert recipe.train.steps == 244
    assert recipe.train.seed == recipe.data.seed == recipe.model.seed == 7
    assert recipe.rows_per_step * TINY.seq == TINY.batch_tokens
    named = changes(method, TINY)
    if "optimizer" not in named:
        assert recipe.train.layers is not None
        assert recipe.train.lr == 1e-3
    else:
        assert recipe.optimizer.name == named["optimizer"]["name"]


def test_two_rates_of_a_method_have_recipes_of_their_own(tmp_path: Path) -> None:
    """They run side by side."""
    names = {runs._recipe_file(tmp_path / Job("adamw", lr, 0).name).name for lr in LADDER}
    assert len(names) == len(LADDER)


def test_sizes_are_what_the_documentation_says() -> None:
    assert TINY.parameters == 1_053_824
    assert [round(p.parameters, -5) for p in PROFILES.values()] == [0, 400_000, 1_100_000, 5_800_000, 17_300_000]


def test_the_short_table_is_eight_methods_and_one_seed(tmp_path: Path) -> None:
    """Whatever is asked instead may change between two calls: it is not in what results have in common."""
    short = PROFILES["short"]
    names = chosen([], short)
    assert len(names) == 8
    assert short.seeds == (0,)
    assert set(names) <= {name for name, facts in methods().items() if facts.kind == "update rule"}
    assert chosen(["came"], short) == ["came"]
    assert replace(short, methods=("came",), seeds=(3, 4)).digest("x") == short.digest("x")
    assert replace(short, tokens=1).digest("x") != short.digest("x")


def test_a_basis_lasts_a_tenth_of_the_run_at_most() -> None:
    assert changes("galore8bit", TINY)["optimizer"] == {"name": "galore8bit", "rank": 0, "refresh": 24}
    assert changes("galore8bit", PROFILES["medium"])["optimizer"]["refresh"] == 122
    assert changes("adamw", TINY)["optimizer"] == {"name": "adamw"}


def test_the_text_is_always_the_same_and_real() -> None:
    first = [text for _, text in zip(range(300), documents(code=False), strict=False)]
    again = [text for _, text in zip(range(300), documents(code=False), strict=False)]
    assert first == again
    assert any("with" in text for text in first)
    assert sum(map(len, first)) > 300_000


def record(method: str, lr: float, seed: int, loss: float | None, **more: Any) -> dict[str, Any]:
    done = {
        "status": "done" if loss is not None else "diverged",
        "state_bytes": 8_000_000,
        "peak_bytes": 30_000_000,
        "seconds_per_step": 0.1,
        "wall_seconds": 5.0,
        "date": "2026-01-02",
        "versions": {"python": "3.11", "torch": "2"},
    }
    return {"method": method, "lr": lr, "seed": seed, "loss": loss, **done, **more}


def test_a_torn_line_is_removed_and_other_profiles_are_not_mixed_in(tmp_path: Path) -> None:
    results = Results(tmp_path, "a")
    results.add(record("adamw", 1e-3, 0, 4.0))
    Results(tmp_path, "b").add(record("adamw", 1e-3, 0, 1.0))
    with results.path.open("ab") as out:
        out.write(b'{"digest": "a", "meth')
    found = Results(tmp_path, "a")
    assert found.losses("adamw") == {(1e-3, 0): 4.0}
    assert found.path.read_bytes().endswith(b"\n")
    found.add(record("lion", 1e-4, 0, None, status="failed", why="exit code 1"))
    assert found.refused("lion")
    assert not Results(tmp_path, "a").refused("lion"), "a failure is tried anew by the next call"
    found.path.write_text("[]\n")
    with pytest.raises(SkimpError, match="line 1 of"):
        Results(tmp_path, "a")


def test_the_table_shows_who_loses_who_diverges_and_who_is_refused(tmp_path: Path) -> None:
    results = Results(tmp_path, "a")
    for lr, loss in ((1e-3, 4.1), (3e-3, 4.0), (1e-2, 4.2)):
        results.add(record("adamw", lr, 0, loss))
    results.add(record("adamw", 3e-3, 1, 4.02))
    results.add(record("adamw8bit", 1e-3, 0, 3.9))
    results.add(record("adamw", 3e-3, 5, 9.0))  # of another call's seeds
    results.add(record("lion", 3e-4, 0, None))
    results.add(record("adamw-bf16", 3e-3, 0, None, status="refused", why="no | such precision\nmore"))
    text = markdown(TINY, ["adamw", "adamw8bit", "lion", "adamw-bf16"], [0, 1], results, "0" * 64, 2)
    rows = text.splitlines()[2:6]
    assert rows[0].startswith("| adamw8bit | 49.40 (1 of 2 seeds) | -10.4 % | 0.001 |")
    assert rows[1].startswith("| adamw | 55.15 ± 0.78 | +0.0 % | 0.003 | 8.00 MB | 30.0 MB | 100 ms |")
    assert rows[2].startswith("| lion | diverged at every rate |")
    assert rows[3].startswith("| adamw-bf16 | no / such precision |")
    assert "1,053,824 parameters" in text
    assert "2026-01-02" in text


def test_runs_are_handed_out_until_nothing_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a run that answers at once; one that is stopped from outside leaves no line and is due again."""
    stopped: list[Job] = []

    def answer(profile: Any, job: Job, work: Path, threads: int, started: Any) -> dict[str, Any] | None:
        if job.lr == 3e-3 and job.seed == 0 and not stopped:
            stopped.append(job)
            return None
        return record(job.method, job.lr, job.seed, abs(math.log(job.lr / 3e-3)) + 1)

    monkeypatch.setattr(pretrain, "prepare", lambda folder, profile: "text")
    monkeypatch.setattr(runs, "run", answer)
    seen: list[tuple[int, int]] = []
    bench = Pretrain(TINY, ["adamw"], [0, 1], tmp_path, 2, lambda done, of, left, _: seen.append((done, of)))
    assert bench.run()
    assert stopped
    assert seen[-1] == (4, 4)
    assert bench.due() == []
    assert "| adamw |" in bench.table()
    again = Pretrain(TINY, ["adamw", "lion"], [0, 1], tmp_path, 2)
    assert {job.method for job in again.due()} == {"lion"}
    assert not Pretrain(TINY, ["lion"], [0], tmp_path, 1).run(minutes=0.0)


def test_a_run_that_is_killed_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system kills what takes too much memory; the next call tries anew."""
    begun: list[Job] = []

    def answer(profile: Any, job: Job, work: Path, threads: int, started: Any) -> dict[str, Any] | None:
        if job.method == "lion":
            begun.append(job)
            return None
        return record(job.method, job.lr, job.seed, 4.0 + job.lr)

    monkeypatch.setattr(pretrain, "prepare", lambda folder, profile: "text")
    monkeypatch.setattr(runs, "run", answer)
    bench = Pretrain(TINY, ["lion", "adamw"], [0], tmp_path, 1)
    assert bench.run()
    assert len(begun) == runs.KILLS
    assert "| lion | killed from outside 3 times" in bench.table()
    assert Pretrain(TINY, ["lion"], [0], tmp_path, 1).due()


def test_the_folder_of_a_run_that_an_earlier_call_left_running_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no checkpoint yet; a child of a killed benchmark holds its lock."""
    monkeypatch.setattr(pretrain, "prepare", lambda folder, profile: "text")
    monkeypatch.setattr(runs, "PATIENCE", 0.0)
    monkeypatch.setattr(runs.subprocess, "Popen", lambda *_, **__: pytest.fail("a second run was begun beside it"))
    job = Job("adamw", 3e-3, 0)
    folder = tmp_path / "runs" / job.name
    run = claim(folder, {}, resume=False)
    try:
        with pytest.raises(SkimpError, match="another process runs there"):
            Pretrain(TINY, ["adamw"], [0], tmp_path, 1).run()
        with pytest.raises(SkimpError, match="another process runs there"):
            runs.run(TINY, job, tmp_path, 1, lambda child: None)
        assert (folder / RUN).is_file()
    finally:
        run.close()
    runs.wait_for_orphans(tmp_path)


@pytest.mark.slow
def test_a_killed_benchmark_goes_on_and_ends_with_a_table(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "skimp.cli.main", "bench", "pretrain", "--profile", "seconds", "--methods"]
    argv += ["adamw,lisa", "--seeds", "0", "--jobs", "1", "--output", str(tmp_path / "bench")]
    env = child_environment(OMP_NUM_THREADS="1")
    first = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    lines = tmp_path / "bench" / "results.jsonl"
    until = time.monotonic() + 200
    while not lines.is_file() and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = len(lines.read_text().splitlines())
    assert kept >= 1
    second = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=True)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) == 4 > kept
    assert {r["status"] for r in found} == {"done"}
    assert "| lisa |" in second.stdout
    states = {r["method"]: r["state_bytes"] for r in found}
    assert states["lisa"] < states["adamw"]
    assert (tmp_path / "bench" / "pretrain.md").is_file()
    assert not any((tmp_path / "bench" / "runs").iterdir())
