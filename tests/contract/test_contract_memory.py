"""Simulated = tracked = allocated, to the byte, and the same operators in the same order: what a plan rests
on.

The witness is torch's profiler, which knows nothing of skimp: it sees every call to c10's CPU allocator,
counted from zero at the start of two real optimizer steps.
"""

from __future__ import annotations

import pytest
from contract_rows import (
    CELLS,
    ROWS,
    SEQ,
    STYLES,
    TECHNIQUES,
    bfloat16_instructions,
    make_run,
    measured,
    state_tensors,
)

#: The cells the promise is made for; every other one is in the slow table.
PROMISED = [
    (technique, style)
    for technique in ("plain", "recompute", "accumulation", "in-backward", "8-bit")
    for style in ("llama-tied", "gpt2", "qwen2")
]
OTHERS = [(technique, "llama") for technique in TECHNIQUES] + [("plain", style) for style in STYLES]
FAST = list(dict.fromkeys([*PROMISED, *OTHERS]))
ALL = [cell for cell in CELLS if cell not in FAST]


def check(technique: str, style: str, count: int, rows: int = ROWS, seq: int = SEQ) -> None:
    if "bf16" in technique and bfloat16_instructions():
        pytest.skip("a CPU with bfloat16 instructions: its products take less than the rules say")
    cell = measured(technique, style, count, rows, seq)
    assert cell.simulated.rest == cell.tracked.rest
    assert cell.simulated.above == cell.tracked.above
    if TECHNIQUES[technique].mapped:
        assert cell.witness.peak <= cell.tracked.above  # a region of a mapped file is no allocation
    else:
        assert cell.tracked.above == cell.witness.peak
    # What two steps leave behind: nothing but what the next step replaces.
    assert cell.simulated.left == cell.tracked.left == cell.witness.held


@pytest.mark.parametrize(("technique", "style"), FAST)
def test_simulated_tracked_and_allocated_bytes_are_equal(technique: str, style: str) -> None:
    check(technique, style, count=1)


@pytest.mark.parametrize(("technique", "style"), FAST)
def test_operators_of_a_simulated_and_a_real_step_are_the_same(technique: str, style: str) -> None:
    cell = measured(technique, style)
    assert len(cell.simulated.operators) > 100
    assert cell.simulated.operators == cell.tracked.operators


@pytest.mark.parametrize(("technique", "style"), [("plain", "llama-tied"), ("recompute", "gpt2"), ("8-bit", "qwen2")])
def test_bytes_are_equal_on_two_threads_and_at_another_size(technique: str, style: str) -> None:
    check(technique, style, count=2, rows=3, seq=67)


@pytest.mark.slow
@pytest.mark.parametrize(("technique", "style"), ALL)
def test_bytes_and_operators_of_the_whole_table(technique: str, style: str) -> None:
    check(technique, style, count=1)
    cell = measured(technique, style)
    assert cell.simulated.operators == cell.tracked.operators


@pytest.mark.slow
@pytest.mark.parametrize("size", [(ROWS, SEQ), (3, 203), (2, 509)])
@pytest.mark.parametrize(("technique", "style"), PROMISED)
def test_promised_bytes_at_two_thread_counts_and_more_sizes(technique: str, style: str, size: tuple[int, int]) -> None:
    for count in (1, 2):
        check(technique, style, count, *size)


@pytest.mark.parametrize("technique", ["plain", "8-bit", "bf16", "bf16-8-bit", "bf16-mixed"])
@pytest.mark.parametrize("style", ["llama-tied", "gpt2"])
def test_state_bytes_formula_is_what_is_allocated(technique: str, style: str) -> None:
    run = make_run(technique, style)
    planned = sum(run.optimizer.bytes_of(p) for _, p in run.parameters())
    assert planned == sum(t.untyped_storage().nbytes() for t in state_tensors(run)) > 0
    assert planned == sum(row.state_bytes for row in run.optimizer.table())
