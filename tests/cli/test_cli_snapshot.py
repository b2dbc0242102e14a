"""`skimp doctor SNAPSHOT.pickle` at the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "run"))

from test_snapshot import MIB, STORY, event, write


def test_a_snapshot_on_the_screen(skimp: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle")
    done = skimp("doctor", str(path), columns=110)
    assert (done.code, done.err) == (0, "")
    for part in ("3 segments, 44.0 MB", "17.8 MB of the reserved in pieces", "100% of the blocks", "train.py:31 step"):
        assert part in done.out, part


def test_as_json_beside_a_plan(skimp: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle")
    plan = {"places": {"device": {"allocator": {"requested_bytes": 1, "reserved_bytes": 42 * MIB}}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = skimp("doctor", str(path), "--plan", str(tmp_path), "--json")
    said = json.loads(done.out)
    assert done.code == 0
    assert said["devices"][0]["modelled_reserved_peak_bytes"] == 42 * MIB
    assert said["plan"]["error"] == 0.0
    shown = skimp("doctor", str(path), "--plan", str(tmp_path))
    assert "+0.0%" in shown.out


def test_a_refused_request_ends_with_two(skimp: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", device_traces=[[*STORY, event("oom", 0, 90 * MIB, device_free=5 * MIB)]])
    done = skimp("doctor", str(path))
    assert done.code == 2
    assert "94.4 MB asked for, 5.24 MB free" in done.out


def test_what_is_none_is_bad_input(skimp: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no pickle at all")
    done = skimp("doctor", str(path))
    assert done.code == 2
    assert "a CUDA memory snapshot at" in done.err
    assert "Traceback" not in done.err + done.out
    assert skimp("doctor", "--plan", str(tmp_path)).code == 2
