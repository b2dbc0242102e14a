"""The benchmarks' own machinery: a wrong ruler makes every figure wrong."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts that import each other from their own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM and its reset are Linux's")
def test_peak_of_a_child_survives_its_own_reset(tmp_path: Path) -> None:
    """80 MB held, freed, and the mark set back, as `skimp train` does after planning: the peak must
    still show it.
    """
    import measure

    code = (
        "import time; a = bytearray(b'x') * 80_000_000; time.sleep(0.6); del a; "
        "open('/proc/self/clear_refs', 'w').write('5'); time.sleep(0.1); print('done')"
    )
    child = measure.watch([sys.executable, "-c", code], tmp_path / "log.txt")
    small = measure.watch([sys.executable, "-c", "print('small')"], tmp_path / "small.txt")
    assert (child.code, child.out.strip()) == (0, "done")
    assert child.peak - small.peak > 70_000_000


def test_a_failing_child_is_not_a_figure(tmp_path: Path) -> None:
    import measure

    child = measure.watch([sys.executable, "-c", "import sys; print('why'); sys.exit(7)"], tmp_path / "log.txt")
    assert child.code == 7
    with pytest.raises(SystemExit, match="why"):
        child.check("row")
    killed = measure.watch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path / "log.txt")
    assert killed.code == -signal.SIGKILL


def test_finished_rows_outlive_a_kill(tmp_path: Path) -> None:
    import measure

    path = tmp_path / "results.json"
    measure.Results(path).put(["row", 1, {"b": 2, "a": 1}], {"peak": 3})
    again = measure.Results(path)
    assert again.get(["row", 1, {"a": 1, "b": 2}]) == {"peak": 3}
    assert again.get(["row", 2, {"a": 1, "b": 2}]) is None
    assert measure.Results(path, fresh=True).get(["row", 1, {"a": 1, "b": 2}]) is None


def test_table_and_verdicts() -> None:
    import measure

    lines = measure.table(["name", "bytes"], [["a", 1], ["longer", 1234]]).splitlines()
    assert lines == ["| name   | bytes |", "|--------|------:|", "| a      |     1 |", "| longer |  1234 |"]
    said, good = measure.verdicts([("x", 0.4, "<=", 0.42), ("y", 1.0, ">=", 1.0)])
    assert good
    assert all(line.startswith("met") for line in said)
    said, good = measure.verdicts([("x", float("nan"), "<=", 1.0)])
    assert not good
    assert said[0].startswith("MISSED")


@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_reach_every_point_and_leave_steps_to_spare(seed: int) -> None:
    """At least 8 inside saves, each point at least once; by the worst count the run is not over
    before the last.
    """
    import kills
    from skimp.run.faults import POINTS

    chosen = kills.choose(20, seed)
    inside = [k.point.split(":") for k in chosen if k.point]
    assert len(chosen) == 20
    assert len(inside) == 12
    assert {point for point, _ in inside} == set(POINTS)
    assert chosen[0] == kills.Kill("before_rename:2")
    assert kills.choose(20, seed) == chosen != kills.choose(20, seed + 1)
    # A save is every second step. A death in a process's n-th save makes at most n saves last: 2 n steps.
    lasting = sum(2 * _saves(kills, point, int(n)) for point, n in inside)
    # From outside: those steps, and as many as a machine does within a tenth of a second at 0.1 s a step
    # and more.
    lasting += sum(k.steps + 1 for k in chosen if not k.point)
    assert lasting < 60


def _saves(kills: Any, point: str, count: int) -> int:
    return -(-count // kills.PASSES.get(point, 1))


def test_rows_of_both_sides_are_described_once(tmp_path: Path) -> None:
    """The recipe that hf.py writes is valid, and its schedule is the one HF's side computes."""
    from hf_work import CLIP, LR, WARMUP, recipe
    from skimp.recipe import load_recipe

    job = {"model": "smollm2-135m", "text": "pydoc", "seq": 64, "steps": 20, "rows": 4}
    described = load_recipe(recipe(job, output=str(tmp_path), optimizer="adamw", budget=10**9))
    assert (described.train.lr, described.train.clip, described.train.warmup) == (LR, CLIP, WARMUP)
    assert (described.train.weight_decay, described.data.packing, described.eval) == (0.0, False, None)
    assert described.budget.host == 10**9
    assert described.rows_per_step == 4


def test_halves_are_disjoint_complete_and_seeded() -> None:
    import accuracy

    calibration, report = accuracy.halves(accuracy.CASES, 3)
    assert calibration | report == set(accuracy.CASES)
    assert not calibration & report
    assert len(report) >= len(calibration) > 0
    assert accuracy.halves(accuracy.CASES, 3) == (calibration, report)


def measured(**changes: Any) -> dict[str, Any]:
    """A row of a case that trains with nothing but tensors of 1 GB on a process of 400 MB."""
    phases = {"train": 10**9, "load": 3, "save": 2 * 10**8, "resume": 3 * 10**8}
    row = {"name": "llama-64", "baseline": 400_000_000, "measured": 1_450_000_000, "phases": phases, "policy": "pool"}
    return {**row, **changes}


def test_error_is_signed_and_over_what_a_run_took_above_its_process() -> None:
    """By the present rule, for the fullest of all phases."""
    import accuracy
    from skimp.plan.slack import Shape, beside

    row = measured()
    rule = beside(10**9, "pool", Shape(4))
    assert accuracy.predicted(row) == 400_000_000 + rule
    assert accuracy.error(row) == pytest.approx((rule - 1_050_000_000) / 1_050_000_000)
    assert accuracy.error(measured(measured=2_000_000_000)) < 0
    assert accuracy.extra(row) == 50_000_000
    assert accuracy.highest(measured(phases={"train": 1, "resume": 2})) == 2


def test_rows_outlive_a_death_and_a_cut_line_is_measured_again(tmp_path: Path) -> None:
    import accuracy

    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "a", "n": 1}\n{"key": "b", "n"')
    assert list(accuracy.kept(path)) == ["a"]
    assert accuracy.kept(tmp_path / "none") == {}


def test_accuracy_has_sixty_cases_of_its_kinds_and_valid_recipes(tmp_path: Path) -> None:
    import accuracy_cases
    from skimp.recipe import load_recipe

    cases = accuracy_cases.CASES
    assert len(cases) >= 60
    assert len({str(case) for case in cases.values()}) == len(cases)
    for name in cases:
        load_recipe(accuracy_cases.recipe(name, tmp_path), [])
    assert {case["seq"] for case in cases.values()} >= {64, 128, 256, 512, 1024, 2048, 4096, 8192}
    assert {case["model"] for case in cases.values()} == set(accuracy_cases.MODELS)
    assert {case["precision"] for case in cases.values()} == {"fp32", "bf16", "bf16-mixed"}
    assert sum(case["adapter"] is not None for case in cases.values()) >= 6


def test_oracle_row_is_equal() -> None:
    """One cell of the table for real; the others are the benchmark's."""
    import oracle

    row = oracle.compare("llama", "tied", 40)
    assert row["equal"], row
    assert row["simulated"] > 1_000_000


@pytest.mark.slow
def test_a_few_kills_for_real(tmp_path: Path) -> None:
    """The whole kill benchmark in small, as a process: three deaths, a full disk, twelve steps."""
    import measure

    script = [sys.executable, str(BENCHMARKS / "kills.py"), "--kills", "3", "--steps", "12", "--seq", "32"]
    child = measure.watch([*script, "--work", str(tmp_path / "work")], tmp_path / "log.txt")
    assert child.code == 0, child.out[-3000:]
    assert "bit-equal after every death" in child.out


def test_points_are_spread_evenly_in_seconds_and_none_is_a_tie() -> None:
    import step_time

    of = [SimpleNamespace(seconds=s) for s in (1.0, 1.001, 1.01, 1.3, 1.31, 1.5, 1.52, 1.99, 2.0)]
    assert [p.seconds for p in step_time.spread(of, 5)] == [1.0, 1.3, 1.5, 2.0]
    assert [p.seconds for p in step_time.spread(of, 2)] == [1.0, 2.0]
    assert len(step_time.spread(of[:1], 5)) == 1
    assert step_time.correlation([1.0, 2.0, 3.0], [5.0, 6.0, 9.0]) == 1.0
    assert step_time.correlation([1.0, 2.0, 3.0], [9.0, 6.0, 5.0]) == -1.0
