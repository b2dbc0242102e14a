"""Plans of slices: blocks that tune unlike numbers of units are stood for by the fullest one."""

from __future__ import annotations

import pytest
from test_plan_adapted import CONFIG, recipe

from skimp.core.exact import ExactChoices
from skimp.core.memory.oracle import witness
from skimp.core.memory.tracker import Tracker
from skimp.data.synthetic import synthetic_batch
from skimp.plan.adapted import for_few_blocks
from skimp.plan.make import make_plan
from skimp.plan.simulate import simulate
from skimp.run.build import Run, build
from skimp.run.choosing import choose_on_text
from skimp.run.weights import init_scratch

S2FT = "adapter={name: s2ft, o: 0.2, u: 0.02, d: 0.05}"


def test_a_small_model_gets_what_the_fullest_block_tunes() -> None:
    asked = recipe(S2FT, "exact.in_backward=false")
    few = for_few_blocks(asked, CONFIG)
    assert few.adapter.asked()["select"] == "weight"
    plan = make_plan(asked, CONFIG, memory=10**10)
    whole = simulate(asked, plan.exact, CONFIG)
    assert plan.profile.peak_bytes == whole.peak_bytes
    small = simulate(few, plan.exact, CONFIG)
    assert small.peak_bytes >= whole.peak_bytes
    assert plan.profile.trained == whole.trained < small.trained
    assert plan.disk_bytes == whole.kept_bytes == 12 * whole.trained


def test_a_plan_of_slices_keeps_less_for_backward_than_one_of_low_rank_additions() -> None:
    """On plain kernels: fused ones make the input of down again for either, and attention keeps that of o anyway."""
    sliced = recipe("adapter={name: s2ft, o: 0.25, d: 0.15}", "exact.kernels=plain")
    low = recipe("adapter={r: 2}", "exact.kernels=plain")
    one, other = (simulate(r, ExactChoices(micro_rows=2), CONFIG) for r in (sliced, low))
    assert one.trained > other.trained
    assert one.phases["train"] < 0.9 * other.phases["train"]


def test_scored_slices_are_alike_in_every_block() -> None:
    asked = recipe("adapter={name: s2ft, o: 0.25, d: 0.05, select: weight}")
    assert for_few_blocks(asked, CONFIG) is asked


@pytest.mark.parametrize("select", ["activation", "product", "gradient"])
def test_choosing_on_text_takes_what_is_planned_to_the_byte(select: str) -> None:
    asked = recipe(f"adapter={{name: s2ft, v: 0.5, o: 0.25, d: 0.05, select: {select}}}")
    exact = ExactChoices(micro_rows=2)

    def begun() -> Run:
        return build(asked, exact, CONFIG, fill=lambda model: init_scratch(model, 0))

    row = synthetic_batch(asked.data.seq_len, 1, CONFIG["vocab_size"])
    whole = synthetic_batch(asked.data.seq_len, asked.rows_per_step, CONFIG["vocab_size"])
    run, tracker = begun(), Tracker()
    with tracker:
        run.show_to(tracker, whole)
        rest = tracker.live
    choose_on_text(begun(), [row])  # what is made once in a process
    run = begun()
    assert run.adapter is not None
    assert run.adapter.waits
    _, seen = witness(lambda: choose_on_text(run, [row]))
    assert not run.adapter.waits
    planned = simulate(asked, exact, CONFIG).phases["choose"]
    # A row of the step's own in the plan, one beside them here.
    assert planned == rest + seen.peak
