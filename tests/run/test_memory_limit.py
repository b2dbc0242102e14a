"""Real limits: the system refuses memory to a process of its own, and the run goes on within what it may have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from session_cases import merged

from skimp.kernels.native import pool

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits on a process's memory")

#: Trains, and after the second step takes all but a little of the address space away. The tracker watches the second
#: step of a plan, so that the third is the first without any change of its own.
LIMITED = """
import json, resource, sys
import skimp.api
from skimp.core.memory.process import set_malloc_policy
from skimp.kernels.native import pool
from skimp.run.voice import Voice

recipe, spare, kind = json.loads(sys.argv[1]), int(sys.argv[2]), getattr(resource, sys.argv[3])
set_malloc_policy()

def held():
    field = {"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:"}[sys.argv[3]]
    with open("/proc/self/status") as lines:
        return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(field))

class Limiting(Voice):
    def step(self, progress):
        if progress.step == 3:
            if recipe["exact"]["malloc"] == "pool":
                pool.set_limit(0)  # blocks that wait would serve the next step without asking the system
            resource.setrlimit(kind, (held() + spare, resource.RLIM_INFINITY))
    def say(self, text):
        print(text, flush=True)

try:
    outcome = skimp.api.train(recipe, voice=Limiting())
    print(json.dumps({"survived": outcome.summary["survived"], "plan": outcome.summary["plan"]["chosen"]}))
except skimp.core.errors.SkimpError as error:
    print(json.dumps({"error": type(error).__name__, "code": error.exit_code, "message": error.message()}))
"""
WIDE = {
    "data.seq_len": 128,
    "train.batch_tokens": 64 * 128,
    "train.steps": 5,
    "checkpoint.every": 2,
    "eval": None,
    "exact": {"in_backward": False, "loss_chunk": 64, "malloc": "return"},
}


def limited(recipe: dict[str, Any], spare: int, kind: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, json.dumps(recipe), str(spare), kind],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "malloc"),
    [
        ("RLIMIT_AS", "return"),
        ("RLIMIT_DATA", "return"),
        pytest.param("RLIMIT_AS", "pool", marks=pytest.mark.skipif(not pool.available(), reason="no C++ compiler")),
    ],
)
def test_a_limit_that_comes_in_the_middle_is_met_with_a_smaller_plan(
    kind: str, malloc: str, recipe: dict[str, Any]
) -> None:
    """64 rows of 128 tokens at once need some 60 MB of activations; 24 MB more than at rest are left."""
    found = limited(merged(recipe, WIDE | {"exact": {**WIDE["exact"], "malloc": malloc}}), 24_000_000, kind)
    assert found.get("survived"), found
    assert "refused while the process held" in found["survived"][0]
    assert found["plan"]["micro_rows"] < 64
    rows = [json.loads(line) for line in (Path(recipe["output"]) / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_limit_nothing_fits_into_ends_with_everything_saved(recipe: dict[str, Any]) -> None:
    """Room for a checkpoint's buffer and little else; every choice pinned."""
    pinned = WIDE | {
        "exact": {"micro_batch": 64, "recompute": 0, "in_backward": False, "loss_chunk": 64, "malloc": "return"}
    }
    found = limited(merged(recipe, pinned), 12_000_000, "RLIMIT_AS")
    assert (found.get("error"), found.get("code")) == ("OutOfMemory", 3), found
    assert "everything until step-00000003 is saved; continue: skimp train" in found["message"]
    assert (Path(recipe["output"]) / "checkpoints" / "step-00000003" / "COMPLETE").is_file()
