"""Simulate a run: the same `build`, the same step, on tensors that have shapes and no values.

Two full optimizer steps (so that whatever the first leaves behind is in the second), then an evaluation batch.
No weights, no data, and in memory only the book-keeping: an 80-block model needs seconds and megabytes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skimp.core import attention
from skimp.core.batch import Batch
from skimp.core.coded_model import largest_coded, parameter_count
from skimp.core.coded_trained import stored
from skimp.core.exact import ExactChoices, Place
from skimp.core.lean import lean_imports
from skimp.core.memory.remembered import Remembering
from skimp.core.memory.timeline import Timeline
from skimp.core.memory.trace import Trace
from skimp.core.memory.tracker import CATEGORIES, Tracker, scope
from skimp.core.repeat import shortened
from skimp.core.structure import layers_of
from skimp.plan import transfers
from skimp.plan.cost import CostMeter, Rates
from skimp.plan.profile import MemoryProfile
from skimp.plan.sharded import largest_unit, sharded
from skimp.plan.unfakeable import or_measured, told
from skimp.run import offloaded
from skimp.run.build import DTYPES, Run, build
from skimp.run.calibrated import calibration_phase
from skimp.run.choosing import choose_on_text
from skimp.run.tensor_bytes import CHUNK
from skimp.run.weights import init_scratch

UNKNOWN_RATES = Rates(1e11, 1e10, "unknown device")


@or_measured
def simulate(
    recipe: Any,
    exact: ExactChoices,
    config: dict[str, Any],
    *,
    rates: Rates = UNKNOWN_RATES,
    target: str = "cpu",
    steps: int = 2,
    blocks: int | None = None,
    micro_batches: int | None = None,
    timeline: bool = False,
    documents: tuple[int, ...] | None = None,
    short: bool = False,
    evaluate: bool | None = None,
    trace: Trace | None = None,
    cards: int = 1,
    real: bool = False,
) -> MemoryProfile:
    """Peaks and seconds of training with these choices.

    Args:
        recipe, exact, config: as `build`.
        rates: the device's, for the seconds.
        target: "cpu" adds what ATen's CPU operators allocate inside a call; "cuda" does not.
        steps: optimizer steps simulated.
        blocks: simulate only so many of the model's blocks (for extension by `plan.extend`).
        micro_batches: simulate at most so many of a step's micro-batches; the third is like the second. Where they are
            added up in backward one more: the last moves the parameters, and holds less than those before it.
        timeline: record the memory of the last step over its operators.
        short: for a search: one round stands for all equal ones in chunk loops, and evaluation, which keeps
            nothing for backward, is left out.
        evaluate: simulate an evaluation batch too; None: unless `short`.
        trace: write every allocation and release into it, those before the first step included.
        cards: shard what the step holds over so many, by formula (`plan.sharded`); the recipe is one card's.
        real: on real tensors with random weights, for what cannot be simulated (`plan.unfakeable`).
        documents: boundaries of every row; None takes the costliest packing, one document and one token.
    """
    if blocks is not None:
        key = layers_of(config)
        config = {**config, key: blocks}
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:blocks]
    if micro_batches is not None and exact.in_backward and exact.micro_rows < recipe.rows_per_step:
        micro_batches += 1
    with lean_imports():  # its constructor asks the compiler for its settings
        mode: Any = contextlib.nullcontext() if real else FakeTensorMode()
    with attention.target(target), Remembering():
        run = (
            build(recipe, exact, config, fill=lambda model: init_scratch(model, recipe.model.seed))
            if real
            else build(recipe, exact, config, simulate=mode)
        )
    if blocks is not None and run.adapter is not None:
        _first_like_the_others(run)
    meter = CostMeter(rates)
    tracker = Tracker(host_rules=target == "cpu", observer=meter, trace=trace)
    batch = _batch(mode, recipe.rows_per_step, recipe, documents)
    loops = shortened() if short else contextlib.nullcontext()
    with attention.target(target), loops, _no_collector(), told(run.model, tracker), mode, tracker:
        run.show_to(tracker, batch)
        resting = {k: v for k, v in tracker.by_category.items() if v}
        # The whole step's rows are there; of its micro-batches so many are run.
        part = batch if micro_batches is None else batch.take(0, min(batch.rows, exact.micro_rows * micro_batches))
        rest = tracker.live
        tracker.reset_peak()
        if run.layers is not None:
            steps = max(steps, len(run.layers.sets))  # each step trains another of the costliest sets of blocks
        for index in range(steps):
            meter.on = index == steps - 1
            if trace is not None:
                trace.begin_step()
            tracker.count = 0  # operators are numbered within their step, as a watched real step numbers them
            if timeline and meter.on:
                # Its seconds are the predicted ones: those of simulating mean nothing.
                tracker.timeline = Timeline(CATEGORIES, clock=lambda: int(meter.seconds * 1e9))
            before = offloaded.moved(run)
            run.step(part)
        meter.on = False
        drawn, tracker.timeline = tracker.timeline, None
        peak, places, shares, starts = tracker.peak, dict(tracker.peaks), dict(tracker.shares), dict(tracker.starts)
        phases = {"train": peak.total}
        if recipe.eval is not None and (not short if evaluate is None else evaluate):
            tracker.reset_peak()
            with scope(phase="evaluate"):
                run.evaluate([batch.take(0, 1)])
            phases["evaluate"] = tracker.peak.total
        if run.adapter is not None and run.adapter.waits:
            tracker.reset_peak()
            choose_on_text(run, [batch.take(0, 1)])
            phases["choose"] = tracker.peak.total
        if trace is not None:
            trace.close()
    rule = run.optimizer
    states = {p: rule.bytes_of(p) for p in rule.parameters() if p in rule.state}  # what rests has none
    # Read in pieces: some rows as the file has them, decoded, cast. A coded layer is there dense, with new parts.
    piece = min(CHUNK, 8 * max(p.numel() for p in run.model.parameters()))
    phases["load"] = resting["weights"] + max(9 * largest_coded(run.model), 4 * piece)
    # A checkpoint is written and read in place, what cannot be through one buffer; so are states that live elsewhere.
    phases["save"] = phases["resume"] = rest + CHUNK * (1 if rule.away is None else 2)
    if run.adapter is not None:
        above = {**run.adapter.peaks(), **calibration_phase(recipe, run.model, run.structure)}
        phases |= {phase: rest + more for phase, more in above.items()}
    micro = -(-recipe.rows_per_step // exact.micro_rows)
    compute, flops, fresh = meter.of_step(micro)
    often = micro / min(micro, micro_batches or micro)
    seconds = compute + _away_seconds(run, before, sum(states.values()), rates, compute, often)
    held = offloaded.held(run)
    run.close()
    trained = run.delivery.parameters
    written = {id(tensor): (name, tensor) for name, tensor in stored(run.model)}  # tied ones once
    kept = run.adapter.named_state() if run.adapter is not None else written.values()
    profile = MemoryProfile(
        exact,
        peak,
        resting,
        phases,
        places,
        seconds,
        flops,
        parameter_count(run.model),
        sum(p.numel() for p in trained.values()),
        sum(p.nbytes for _, p in kept) + sum(states.values()),
        {place: _by_category(found) for place, (found, _) in shares.items()},
        {place: operator for place, (_, operator) in shares.items()},
        drawn,
        away={str(place): size for place, size in held.items()},
        fresh=fresh,
        starts=starts,
        by_block={int(k[6:]): often * v for k, v in meter.by_owner.items() if k.startswith("block ")},
    )
    here = int(config[layers_of(config)])
    itemsize = DTYPES[recipe.precision].itemsize
    return sharded(profile, cards, largest_unit(config, profile.parameters, here, itemsize))


def _first_like_the_others(run: Run) -> None:
    """Over a frozen embedding the first block forms no gradient of its input, and holds one tensor less in backward.
    Where a few blocks stand for many it forms one as they do: planes through one and two blocks are then those of all,
    and nothing is under."""
    module = run.model.get_submodule(run.structure.embedding)
    if not module.weight.requires_grad:
        module.register_forward_hook(lambda _module, _ids, hidden: hidden.requires_grad_())


def _away_seconds(
    run: Run, before: dict[Place, tuple[int, int]], states: int, rates: Rates, compute: float, often: float
) -> float:
    """What offloaded bytes add to a step of `compute` seconds; `often` times as much moves as was simulated."""
    now = offloaded.moved(run)
    activations = {
        place: (int(often * (now[place][0] - before[place][0])), int(often * (now[place][1] - before[place][1])))
        for place in now
    }
    parameters = sum(p.nbytes for p in run.delivery.parameters.values())
    update = transfers.update_seconds(run.exact.states, states, parameters, rates.near)
    return transfers.seconds(activations, rates.near, compute) + update


def _by_category(found: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes in the order of CATEGORIES; what the operator needed inside, the last number, is workspace."""
    at = CATEGORIES.index("workspace")
    return tuple(size + (found[-1] if index == at else 0) for index, size in enumerate(found[:-1]))


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """No garbage collection meanwhile: it would walk every book-keeping object again and again (a fifth of the time),
    and nothing a step frees hangs in a cycle, which the contract tables hold against real steps."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _batch(mode: Any, rows: int, recipe: Any, documents: tuple[int, ...] | None) -> Batch:
    """A batch of shapes only. Packed rows are simulated as two documents, S - 1 tokens and 1: the costliest split."""
    seq = recipe.data.seq_len
    if documents is None:
        documents = (0, seq - 1, seq) if seq > 2 else (0, seq)
    with mode:
        ids, labels, positions = (torch.zeros(rows, seq, dtype=torch.int64) for _ in range(3))
        source = torch.zeros(rows, dtype=torch.int64)
    return Batch(ids, labels, positions, (documents,) * rows, rows * seq, source=source)
