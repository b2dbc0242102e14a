"""`Run.rebuild`: a living run goes on under other exact choices as a run that was built with them would.

Every exact row of the table, taken up in the middle of a run of its base and given up again: bit-equal to a fresh
run of the row from there on, hence bit-equal to the base where no sum is reordered.
"""

from __future__ import annotations

import pytest
import torch
from contract_rows import (
    TECHNIQUES,
    batch_of,
    exact_of,
    make_run,
    measured,
    recipe_of,
    state_tensors,
    train,
    watched,
    weights,
    witnessed,
)

from skimp.core.errors import ConflictError, ModelError
from skimp.core.exact import ExactChoices
from skimp.run.effect import Effect

#: Kernels are chosen when layers are made; every other exact choice can change on the living run.
EXACT = [n for n, line in TECHNIQUES.items() if line.base is not None and not n.endswith("plain-kernels")]
FAST = [(name, "llama-tied") for name in EXACT] + [("in-backward", "gpt2"), ("recompute-some", "gemma2")]


def states(run: object) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state_tensors(run)]


@pytest.mark.parametrize(("technique", "style"), FAST)
def test_a_rebuilt_run_goes_on_like_one_that_was_built_so(technique: str, style: str) -> None:
    """Two steps of the base, two of the row, two of the base again; the oracle is a new run each time."""
    row = TECHNIQUES[technique]
    base = row.base
    assert base is not None
    living, oracle = make_run(base, style), make_run(base, style)
    for index, name in enumerate((base, technique, base)):
        if index:
            living.rebuild(exact_of(TECHNIQUES[name]))
            carried = oracle
            oracle = make_run(name, style, seed=7)
            with torch.no_grad():
                for (_, mine), (_, theirs) in zip(oracle.parameters(), carried.parameters(), strict=True):
                    mine.copy_(theirs)
                for mine, theirs in zip(oracle.model.buffers(), carried.model.buffers(), strict=True):
                    mine.copy_(theirs)  # codes of a frozen base, vectors of a spectrum
            flat = {f"{n}.{k}": v for n, k, v in carried.optimizer.named_state()}
            oracle.optimizer.load_named_state(flat, {n for n, _, _ in carried.optimizer.named_state()})
            oracle.events.load_state_dict(carried.events.state_dict())
            if oracle.adapter is not None and carried.adapter is not None:
                oracle.adapter.load_values(carried.adapter.values())
                oracle.adapter.load({n: t.clone() for n, t in carried.adapter.named_state()}.__getitem__)
            oracle.delivery.step_index = carried.delivery.step_index  # dropout is addressed by it
        assert train(living, row, 2, first=2 * index) == train(oracle, row, 2, first=2 * index)
        assert living.delivery.step_index == 2 * index + 2
    for name, value in weights(oracle).items():
        assert torch.equal(value, weights(living)[name]), name
    assert all(map(torch.equal, states(living), states(oracle)))


@pytest.mark.parametrize("technique", [n for n in EXACT if not TECHNIQUES[n].reordered])
def test_a_run_rebuilt_in_the_middle_is_the_run_that_was_not(technique: str) -> None:
    row = TECHNIQUES[technique]
    living, left_alone = (make_run(row.base, "llama-tied") for _ in range(2))
    before = train(living, row, 2)
    living.rebuild(exact_of(row))
    assert before + train(living, row, 2, first=2) == train(left_alone, row, 4)
    for name, value in weights(left_alone).items():
        assert torch.equal(value, weights(living)[name]), name


@pytest.mark.parametrize("technique", ["recompute", "accumulation", "in-backward-recompute", "chunk"])
def test_it_allocates_nothing_and_holds_what_the_plan_says_from_the_next_step_on(technique: str) -> None:
    run = make_run("plain", "llama-tied")
    batch = batch_of("plain")
    run.step(batch)
    exact = exact_of(TECHNIQUES[technique])
    # Gradients of a step that broke off are there when memory ran short: they must go.
    made = witnessed(lambda: run.stepper.loss(batch, batch.trained).backward())
    assert made.held == 4 * sum(p.numel() for _, p in run.parameters())
    freed = witnessed(lambda: run.rebuild(exact)).events
    assert sum(freed) == -made.held
    assert max(freed) < 0
    assert all(p.grad is None for _, p in run.parameters())
    effect = Effect(run)
    planned = measured(technique, "llama-tied").simulated
    again = watched(run, batch)
    assert (again.rest, again.above, again.left) == (planned.rest, planned.above, planned.left)
    assert again.operators == planned.operators
    del effect


def test_what_took_effect_is_what_was_asked() -> None:
    run = make_run("in-backward", "llama-tied", lr=1e-3)
    run.step(batch_of("plain"))
    run.rebuild(exact_of(TECHNIQUES["accumulation-uneven"]))
    effect = Effect(run)
    run.step(batch_of("plain"))
    effect.check(run, 1e-3)  # raises where the micro-batches, the recomputed blocks or the delivery are others


def test_choices_that_cannot_be_are_refused_and_change_nothing() -> None:
    run = make_run("plain", "llama-tied")
    before = (run.exact, run.delivery, run.recompute, run.stepper)
    with pytest.raises(ConflictError, match=r"in_backward[\s\S]*micro_batch=4"):
        run.rebuild(ExactChoices(1, in_backward=True))
    with pytest.raises(ModelError, match=r"exact\.recompute: block 9"):
        run.rebuild(ExactChoices(1, recompute=(9,)))
    assert (run.exact, run.delivery, run.recompute, run.stepper) == before
    assert run.recipe == recipe_of(TECHNIQUES["plain"])
    run.step(batch_of("plain"))


def test_a_frozen_head_has_no_sink_after_it_either() -> None:
    run = make_run("plain", "llama")
    run.close()
    run.delivery.sinks.clear()
    run.rebuild(ExactChoices(1))
    assert run.head.sink is None


def test_a_step_is_midway_from_its_first_update_to_its_last() -> None:
    for technique in ("plain", "in-backward", "in-backward-no-clip"):
        run = make_run(technique, "llama-tied")
        seen: list[bool] = []
        update = run.optimizer.update

        def watched_update(*args: object, run=run, seen=seen, update=update) -> None:
            seen.append(run.delivery.midway)
            update(*args)

        run.optimizer.update = watched_update
        assert not run.delivery.midway
        run.step(batch_of(technique))
        assert len(seen) == len(run.delivery.parameters)
        assert all(seen)
        assert not run.delivery.midway
        run.optimizer.update = lambda *_: (_ for _ in ()).throw(RuntimeError("here"))
        with pytest.raises(RuntimeError, match="here"):
            run.step(batch_of(technique))
        assert run.delivery.midway
        run.delivery.discard()
        assert not run.delivery.midway
        assert all(p.grad is None for _, p in run.parameters())
        assert all(buffer is None for buffer in run.delivery.sinks.values())
