"""The log of planned against measured: appended whole, bounded, sound after a death, and never in a run's way."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skimp.core.child import child_environment
from skimp.core.memory.process import malloc_policy
from skimp.plan import history
from skimp.plan.places import Places
from skimp.plan.seen import LEAST, More, Seen, seen
from skimp.plan.slack import Shape, beside

VERSIONS = {"skimp": "1", "torch": "2"}


def row(process: int = 1_000_000_000, **changes: Any) -> dict[str, Any]:
    """A run whose tensors took 500 MB on a baseline of 400 MB."""
    planned = {"tensors": 500_000_000, "highest": 500_000_000, "process": 1_000_000_000, "baseline": 400_000_000,
               "seconds": 2.0}  # fmt: skip
    return {
        "schema": 1, "machine": "m", "versions": VERSIONS, "recipe": "r", "shape": {"malloc": "pool"},
        "planned": planned, "measured": {"tensors": 500_000_000, "process": process, "seconds": 3.0}, **changes,
    }  # fmt: skip


def rule(row: Any) -> int:
    return int(row["planned"]["highest"]) + 100_000_000


def test_what_is_appended_is_read_again_in_order(tmp_path: Path) -> None:
    log = tmp_path / "a" / "runs.jsonl"
    for n in range(5):
        assert history.append(row(recipe=str(n)), log) is None
    assert [r["recipe"] for r in history.read(log)] == list("01234")


def test_a_torn_line_is_passed_over_and_the_next_one_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    history.append(row(recipe="0"), log)
    with log.open("ab") as file:
        file.write(json.dumps(row(recipe="torn")).encode()[:-40])
    history.append(row(recipe="1"), log)
    assert [r["recipe"] for r in history.read(log)] == ["0", "1"]


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\n",
        b"[]\n",
        json.dumps(row(schema=2)).encode() + b"\n",
        json.dumps(row(measured={"process": "much"})).encode() + b"\n",
        json.dumps({**row(), "planned": {}}).encode() + b"\n",
        json.dumps(row(process=float("nan"))).encode() + b"\n",
    ],
)
def test_lines_that_are_no_records_are_passed_over_and_kept(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / "runs.jsonl"
    log.write_bytes(line)
    history.append(row(), log)
    assert len(history.read(log)) == 1
    assert log.read_bytes().startswith(line)


def test_the_file_is_bounded_and_its_newest_lines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "runs.jsonl"
    monkeypatch.setattr(history, "MOST", 5000)
    for n in range(60):
        history.append(row(recipe=str(n)), log)
    numbers = [int(r["recipe"]) for r in history.read(log)]
    assert log.stat().st_size < 5000 + 2 * len(json.dumps(row()))
    assert numbers == list(range(numbers[0], 60))
    assert len(numbers) > 3


def test_several_processes_append_and_no_line_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    code = (
        "import json, sys; from pathlib import Path; from skimp.plan import history\n"
        "for n in range(40): assert history.append(json.loads(sys.argv[1]), Path(sys.argv[2])) is None"
    )
    words = [sys.executable, "-c", code, json.dumps(row()), str(log)]
    children = [subprocess.Popen(words, env=child_environment()) for _ in range(3)]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert len(history.read(log)) == 120


def test_a_folder_that_takes_nothing_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file where the folder should be")
    said = history.append(row(), tmp_path / "history" / "runs.jsonl")
    assert said is not None
    assert str(tmp_path / "history") in said
    assert history.read(tmp_path / "history" / "runs.jsonl") == []


def test_errors_are_over_what_a_run_took_on_top_of_its_process() -> None:
    found = seen([row(950_000_000), row(1_000_000_000), row(1_060_000_000)], "m", VERSIONS, rule)
    assert found.errors == pytest.approx([50 / 550, 0.0, -60 / 660])
    assert found.ratios == (1.5, 1.5, 1.5)


def test_a_plan_learns_in_one_direction() -> None:
    """What a run took above the rule is added, in bytes and in proportion; what it took less is not taken off."""
    under = seen([row(900_000_000), row(1_030_000_000)], "m", VERSIONS, rule).more["pool"]
    assert under == More(30_000_000, 30 / 500)
    assert under.of(100_000_000) == 30_000_000
    assert under.of(1_000_000_000) == 60_000_000
    assert seen([row(700_000_001)], "m", VERSIONS, rule).more == {}


@pytest.mark.parametrize(
    "other",
    [
        row(machine="n"),
        row(versions={"skimp": "1", "torch": "3"}),
        row(versions={"skimp": "0", "torch": "2"}),
        row(400_000_000 + LEAST - 1),
        row(measured={"tensors": 1, "process": 2_000_000_000, "seconds": None, "survived": 1}),
        row(measured={"tensors": 1, "process": None, "seconds": None}),
    ],
)
def test_what_does_not_count(other: dict[str, Any]) -> None:
    assert seen([other], "m", VERSIONS, rule).errors == ()


@pytest.mark.parametrize("policy", ["pool", "return", "reuse"])
@pytest.mark.parametrize("more", [More(), More(30_000_000, 0.01), More(1_000_000, 0.2)])
def test_the_largest_tensors_that_fit_are_planned_within_the_budget(policy: Any, more: More) -> None:
    """`tensor_budget` and `resident_peak` are inverses, with what was learned and without."""
    where = Places("cpu", 2_000_000_000, 2_000_000_000, 0, 400_000_000, (), seen=Seen(more={policy: more}))
    most = where.tensor_budget(policy)
    assert where.resident_peak(most, policy) <= 2_000_000_000 < where.resident_peak(most + 4, policy)
    plain = replace(where, seen=Seen())
    assert where.resident_peak(most, policy) >= plain.resident_peak(most, policy)
    assert plain.resident_peak(most, policy) == 400_000_000 + beside(most, policy, Shape(), malloc_policy() is not None)


def test_sentences_say_how_many_and_how_far() -> None:
    found = seen([row(950_000_000), row(1_060_000_000)], "m", VERSIONS, rule, recipe="r")
    said = " ".join(found.sentences())
    for part in (
        "2 runs on this machine",
        "-9.1% to +9.1%",
        "1 took more than planned",
        "60.0 MB or 12.0% (pool)",
        "1.50",
    ):
        assert part in said, part
    assert found.least_bytes(1_000_000_000, 400_000_000) == 950_000_000
    assert found.seconds(2.0) == (3.0, 3.0)
    assert "of this shape" in said
    assert Seen().sentences() == []
    assert Seen().seconds(2.0) is None


def test_the_steady_seconds_of_a_run_are_those_after_its_second_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "seconds": s} for n, s in enumerate((9.0, 8.0, 1.0, 2.0, 4.0), 1)]
    metrics.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 6, "sec')
    assert history.steady_seconds(metrics) == 2.0
    assert history.steady_seconds(metrics, most=len(json.dumps(rows[-1])) + 20) == 4.0
    metrics.write_text(json.dumps(rows[0]) + "\n")
    assert history.steady_seconds(metrics) is None


def test_a_machine_has_one_name_and_other_cores_another(monkeypatch: pytest.MonkeyPatch) -> None:
    name = history.machine()
    assert name == history.machine()
    monkeypatch.setattr(history.os, "sched_getaffinity", lambda _: set(range(99)), raising=False)
    assert history.machine() != name


def test_small_runs_and_those_that_shared_their_process_teach_nothing() -> None:
    """Tiny runs among pytest's own memory once made every plan of a machine 280 GB larger."""
    small = row(process=1_200_000_000)
    small["planned"] |= {"highest": 5_000_000}
    crowded = row(process=2_000_000_000)
    found = seen([small, crowded], "m", VERSIONS, rule)
    assert (found.errors, found.more, found.apart) == ((), {}, 1)
    assert any("1 run took more than 1.5 times" in sentence for sentence in found.sentences())
    assert seen([crowded, row(process=1_100_000_000)], "m", VERSIONS, rule).more["pool"].bytes == 100_000_000
