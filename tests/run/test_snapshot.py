"""Memory snapshots in torch's public format, written by hand: read without running them, replayed, told."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from skimp.core.errors import SkimpError
from skimp.core.memory.cuda_settings import MIB, AllocatorSettings
from skimp.run.doctor.snapshot import looks_like_one, read_snapshot
from skimp.run.doctor.snapshot_plan import against
from skimp.run.doctor.snapshot_replay import DeviceReport, report

BASE = 0x7F00_0000_0000
SMALL, FIRST, SECOND = BASE, BASE + 2 * MIB, BASE + 64 * MIB
FRAMES = [
    {"filename": "/x/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
    {"filename": "/srv/me/train.py", "line": 31, "name": "step"},
    {"filename": "??", "line": 0, "name": "main"},
]


def event(action: str, addr: int, size: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 0, "frames": FRAMES, **more}


def freed(addr: int, size: int) -> list[dict[str, Any]]:
    return [event("free_requested", addr, size), event("free_completed", addr, size)]


#: 1,000 bytes in a small segment; three of 6 MiB share one of 20; the middle one goes; 7 MiB do not fit into its place.
STORY = [
    event("segment_alloc", SMALL, 2 * MIB),
    event("alloc", SMALL, 1000),
    event("segment_alloc", FIRST, 20 * MIB),
    event("alloc", FIRST, 6 * MIB - 100),
    event("alloc", FIRST + 6 * MIB, 6 * MIB),
    event("alloc", FIRST + 12 * MIB, 6 * MIB),
    *freed(FIRST + 6 * MIB, 6 * MIB),
    event("segment_alloc", SECOND, 20 * MIB),
    event("alloc", SECOND, 7 * MIB),
    event("alloc", FIRST + 6 * MIB, 5 * MIB),
]


def block(size: int, state: str = "active_allocated", requested: int = 0) -> dict[str, Any]:
    return {"size": size, "requested_size": requested or size, "state": state, "frames": FRAMES}


SEGMENTS = [
    {
        "device": 0,
        "address": address,
        "total_size": sum(b["size"] for b in blocks),
        "stream": 0,
        "segment_type": kind,
        "is_expandable": False,
        "blocks": blocks,
    }
    for address, kind, blocks in (
        (SMALL, "small", [block(1024, requested=1000), block(2 * MIB - 1024, "inactive")]),
        (
            FIRST,
            "large",
            [
                block(6 * MIB, requested=6 * MIB - 100),
                block(6 * MIB, requested=5 * MIB),
                block(6 * MIB),
                block(2 * MIB, "inactive"),
            ],
        ),
        (SECOND, "large", [block(7 * MIB), block(13 * MIB, "inactive")]),
    )
]


def write(path: Path, **changed: Any) -> Path:
    said = {
        "segments": SEGMENTS,
        "device_traces": [STORY, []],
        "allocator_settings": {
            "max_split_size": -1,
            "expandable_segments": False,
            "roundup_power2_divisions": {"1": 0},
        },
        **changed,
    }
    path.write_bytes(pickle.dumps(said))
    return path


def seen(path: Path, **changed: Any) -> DeviceReport:
    (found,) = report(read_snapshot(write(path / "s.pickle", **changed)))
    return found


def test_a_whole_history_comes_out_to_the_byte(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert found.whole
    assert found.agreed == 1.0
    assert found.reserved.now == found.reserved.peak == found.modelled_reserved == 42 * MIB
    # 5 MiB take the hole of 6: the rest of 1 MiB stays with them.
    assert found.allocated == found.modelled_allocated == 1024 + 25 * MIB
    assert found.requested.peak == 1000 + (6 + 6 + 5 + 7) * MIB - 100
    assert found.fragmentation == 17 * MIB - 1024
    assert found.fixed == (3, 42 * MIB)
    assert found.cached == [13 * MIB, 2 * MIB, 2 * MIB - 1024]


def test_the_largest_at_the_fullest_moment_have_the_users_line(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert [held.size for held in found.peak] == [7 * MIB, 6 * MIB, 6 * MIB - 100, 5 * MIB, 1000]
    assert found.peak[0].frames == ("/srv/me/train.py:31 step",)


def test_a_ring_that_begins_later_says_so_and_knows_what_was_there(tmp_path: Path) -> None:
    found = seen(tmp_path, device_traces=[STORY[6:]])
    assert not found.whole
    assert found.reserved.peak == 42 * MIB
    assert found.requested.peak == seen(tmp_path).requested.peak
    assert found.requested.now == 1000 + 24 * MIB - 100


def test_a_block_waiting_for_another_stream_is_not_reused(tmp_path: Path) -> None:
    story = [
        event("segment_alloc", FIRST, 12 * MIB),
        event("alloc", FIRST, 12 * MIB),
        event("free_requested", FIRST, 12 * MIB),
        event("segment_alloc", SECOND, 12 * MIB),
        event("alloc", SECOND, 12 * MIB),
        event("free_completed", FIRST, 12 * MIB),
        event("alloc", FIRST, 12 * MIB),
    ]
    segments = [
        {**SEGMENTS[0], "address": a, "total_size": 12 * MIB, "blocks": [block(12 * MIB)]} for a in (FIRST, SECOND)
    ]
    found = seen(tmp_path, device_traces=[story], segments=segments)
    assert found.modelled_reserved == found.reserved.peak == 24 * MIB
    assert found.agreed == 1.0


def test_segments_given_back_and_requests_refused(tmp_path: Path) -> None:
    story = [
        event("segment_alloc", FIRST, 30 * MIB),
        event("alloc", FIRST, 30 * MIB),
        *freed(FIRST, 30 * MIB),
        event("segment_free", FIRST, 30 * MIB),
        event("segment_alloc", SECOND, 40 * MIB),
        event("alloc", SECOND, 40 * MIB),
        event("oom", 0, 50 * MIB, device_free=9 * MIB),
    ]
    segments = [{**SEGMENTS[0], "address": SECOND, "total_size": 40 * MIB, "blocks": [block(40 * MIB)]}]
    found = seen(tmp_path, device_traces=[story], segments=segments)
    assert found.reserved.peak == found.modelled_reserved == 40 * MIB
    assert found.ooms == [(50 * MIB, 9 * MIB)]


def test_expandable_segments(tmp_path: Path) -> None:
    story = [
        event("segment_map", FIRST, 20 * MIB),
        event("alloc", FIRST, 15 * MIB),
        event("segment_map", FIRST + 20 * MIB, 20 * MIB),
        event("alloc", FIRST + 15 * MIB, 15 * MIB),
    ]
    segments = [
        {
            **SEGMENTS[0],
            "address": FIRST,
            "total_size": 40 * MIB,
            "is_expandable": True,
            "blocks": [block(15 * MIB), block(15 * MIB), block(10 * MIB, "inactive")],
        }
    ]
    settings = {"expandable_segments": True, "max_split_size": 200 * MIB, "garbage_collection_threshold": 0.5}
    path = write(tmp_path / "s.pickle", device_traces=[story], segments=segments, allocator_settings=settings)
    assert read_snapshot(path).settings == AllocatorSettings(expandable=True, max_split=200 * MIB, gc_threshold=0.5)
    (found,) = report(read_snapshot(path))
    assert found.expandable == (1, 40 * MIB)
    assert found.reserved.peak == found.modelled_reserved == 40 * MIB
    assert found.modelled_allocated == 30 * MIB


class Harmful:
    """Reading it as a plain pickle would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "made"
    path = write(tmp_path / "s.pickle", extra=Harmful(trap))
    with pytest.raises(SkimpError, match=r"asks for \w+\.mkdir"):
        read_snapshot(path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Ran out of input"),
        (b"\x89PNG\r\n", "not the pickle that torch writes"),
        (pickle.dumps({"loss": 3.0}), "a dict with loss"),
        (pickle.dumps(17), "a int"),
        (pickle.dumps({"segments": [{"address": 1}], "device_traces": []}), "a snapshot has segments"),
        (pickle.dumps({"segments": [], "device_traces": [[17]]}), "a snapshot has segments"),
    ],
)
def test_what_is_no_snapshot_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(SkimpError, match=said) as caught:
        read_snapshot(path)
    assert "_dump_snapshot" in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"device_traces": [[{"action": "alloc"}]]},
        {"device_traces": [[{"action": "free_requested", "addr": 1}]]},
        {"device_traces": [[event("alloc", SMALL, -3)]]},
        {"device_traces": [[{**event("alloc", SMALL, 3), "size": None}]]},
        {"device_traces": [[{**event("alloc", SMALL, 3), "stream": "s"}]]},
        {"device_traces": [[{**event("alloc", SMALL, 3), "frames": 7}]]},
        {"segments": [{**SEGMENTS[0], "device": "x"}]},
        {"segments": [{**SEGMENTS[0], "total_size": -5}]},
        {"segments": [{**SEGMENTS[0], "blocks": [{**block(5), "frames": 7}]}]},
        {"allocator_settings": [1]},
        {"allocator_settings": {"roundup_power2_divisions": {"a": "b"}}},
        {"allocator_settings": {"roundup_power2_divisions": [1]}},
    ],
)
def test_a_damaged_snapshot_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SkimpError, match="a CUDA memory snapshot at"):
        read_snapshot(write(tmp_path / "s.pickle", **changed))


@pytest.mark.parametrize(
    "plan", [[], {"places": []}, {"places": {"device": 3}}, {"places": {"device": {"allocator": {}}}}]
)
def test_a_file_that_is_no_plan_is_refused(plan: Any, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(SkimpError, match="one for nothing"):
        against(tmp_path, report(read_snapshot(write(tmp_path / "s.pickle"))))


def test_which_paths_mean_a_snapshot(tmp_path: Path) -> None:
    assert looks_like_one(tmp_path / "none.pickle")
    assert not looks_like_one(tmp_path)
    assert not looks_like_one(tmp_path / "runs")
    with pytest.raises(SkimpError, match="No such file"):
        read_snapshot(tmp_path / "none.pickle")


def test_against_a_plan(tmp_path: Path) -> None:
    reports = report(read_snapshot(write(tmp_path / "s.pickle")))
    planned = {"requested_bytes": 30 * MIB, "reserved_bytes": 44 * MIB}
    device = {"name": "t4", "allocator": planned}
    (tmp_path / "plan.json").write_text(json.dumps({"places": {"device": device}}))
    found = against(tmp_path, reports)
    assert found.reserved == 42 * MIB
    assert found.error == pytest.approx(44 / 42 - 1)
    assert against(tmp_path / "plan.json", reports) == found
    (tmp_path / "plan.json").write_text(json.dumps({"places": {"device": {"name": "cpu"}}}))
    with pytest.raises(SkimpError, match="one for cpu"):
        against(tmp_path, reports)
    with pytest.raises(SkimpError, match="a plan at"):
        against(tmp_path / "nothing", reports)
