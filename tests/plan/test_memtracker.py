"""The bytes that skimp's tracker counts in a simulated step are those that torch's own MemTracker counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_extend import CONFIGS, recipe
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from skimp.core import attention
from skimp.core.batch import Batch
from skimp.core.exact import ExactChoices
from skimp.core.memory.tracker import Tracker
from skimp.run.build import build

#: MemTracker hooks every parameter, so that it refuses frozen ones; and every pass in a step but the first.
ROWS, SEQ, STEPS = 3, 32, 2
ALL = tuple(range(3))
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "recomputed": ({"recompute": ALL}, ()),
    "in backward": ({"in_backward": True}, ("train.clip=null",)),
    "chunks": ({"loss_chunk": 16}, ()),
    "8 bits": ({}, ("optimizer=adamw8bit",)),
    "bf16": ({"recompute": (0, 2)}, ("precision=bf16",)),
}


def simulated_run(style: str, name: str) -> tuple[Any, Any, Batch]:
    choices, overrides = CASES[name]
    config = {**CONFIGS[style], ("n_layer" if style == "gpt2" else "num_hidden_layers"): len(ALL)}
    mode = FakeTensorMode()
    run = build(recipe(*overrides), ExactChoices(ROWS, **choices), config, simulate=mode)
    with mode:
        ids, labels, positions = (torch.zeros(ROWS, SEQ, dtype=torch.int64) for _ in range(3))
    return mode, run, Batch(ids, labels, positions, ((0, SEQ),) * ROWS, ROWS * SEQ)


@pytest.mark.filterwarnings("ignore:Expected a tensor")  # its hooks come after ours have freed a gradient
@pytest.mark.parametrize("style", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("name", CASES)
def test_both_count_the_same_bytes_in_the_same_steps(style: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak and rest of each step, both watching one run: MemTracker's hooks keep a tied gradient a step too long.

    Without operators' inner workspaces, of which MemTracker knows nothing.
    """
    monkeypatch.setattr("skimp.core.memory.tracker.aten_cuda.workspace", lambda *_: 0)
    with attention.target("cuda"):
        mode, run, batch = simulated_run(style, name)
        ours, theirs = Tracker(host_rules=False), MemTracker()
        theirs.track_external(run.model, run.optimizer, *batch.tensors())
        run.show_to(ours, batch)
        assert ours.live == total(theirs, "current")
        for _ in range(STEPS):
            theirs.reset_mod_stats()
            ours.reset_peak()
            with mode, ours, theirs:
                run.step(batch)
            assert ours.peak.total == total(theirs, "peak") > ours.live
            assert ours.live == total(theirs, "current")


def total(theirs: MemTracker, when: str) -> int:
    return sum(places["Total"] for places in theirs.get_tracker_snapshot(when).values())
