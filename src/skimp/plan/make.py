"""`make_plan`: recipe in, plan out; what `skimp plan` prints and `skimp train` executes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from skimp.core.errors import ModelError
from skimp.core.exact import ExactChoices
from skimp.core.memory.cuda_settings import settings_here
from skimp.core.memory.process import Policy
from skimp.core.memory.trace import Reservation
from skimp.core.structure import layers_of
from skimp.core.units import format_bytes
from skimp.plan import arena, offloading
from skimp.plan.cost import Rates
from skimp.plan.frontier import explain, frontier
from skimp.plan.mixed import MixedSearch, plain
from skimp.plan.offers import offers
from skimp.plan.offloading import OffloadingSearch
from skimp.plan.places import Places, budgets, places
from skimp.plan.plan import Alternative, Plan
from skimp.plan.probe import probe
from skimp.plan.profile import MemoryProfile
from skimp.plan.reserve import assumptions, best_reserved
from skimp.plan.search import Candidate, Search
from skimp.plan.sharded import one_card
from skimp.plan.slack import POOL_ROOM
from skimp.run.skeleton import dropout_of

#: Share of a card's peak rates that training reaches: products about half, copies about four fifths.
REACHED_FLOPS, REACHED_BANDWIDTH = 0.5, 0.8
#: Seconds to launch a kernel, where the host does not run ahead far enough.
CARD_CALL = 3e-6
#: Other exact ways that a plan names at most.
ALTERNATIVES = 6


def make_plan(
    recipe: Any,
    config: dict[str, Any],
    *,
    gpu: str | None = None,
    memory: int | None = None,
    label: str = "",
    offer: bool = True,
    where: Places | None = None,
    text_bytes: int = 0,
    also: Collection[str] = (),
) -> Plan:
    """Search the exact techniques and explain the outcome.

    Args:
        recipe: the run.
        config: content of the model's HF `config.json`.
        gpu, memory: replace the recipe's device and budget.
        label: the model's name for people.
        offer: when nothing exact fits, simulate the approximate ways too.
        where: the budgets, when they are known already; nothing is measured then.
        text_bytes: of the text as tokens on disk, where it is ready.
        also: "frontier" walks the whole lattice for `Plan.frontier`, "explain" fills `Plan.decisions`, "arena" gives
            the chosen step's tensors fixed addresses (`Plan.arena`).
    """
    where = where or places(recipe, config, gpu, memory, text_bytes)
    recipe = one_card(recipe, where.count)
    blocks = int(config[layers_of(config)])
    target = "cpu" if where.on_cpu else f"cuda:{where.card.capability}"
    rates = device_rates(where, recipe, config)
    search = OffloadingSearch(recipe, config, blocks, budgets(where, recipe), rates, target, where.count)
    reservation = None
    if where.on_cpu or where.count > 1:  # several cards are by formula: no step to replay
        profile, found, seconds = search.best()
    else:
        profile, found, seconds, reservation = best_reserved(search, where)
    # What blocks, segments and the matrix library take on a card beyond the tensors.
    more = 0 if where.on_cpu else 2 * where.card.workspace_bytes
    if reservation is not None:
        more = max(0, reservation.reserved - profile.peak_bytes)
    peak = compared(where, profile.peak_bytes, profile.exact.malloc, more)
    disk, host = _on_disk(recipe, profile, where), _on_host(profile, where)
    fits = peak <= where.device_budget and fits_elsewhere(recipe, profile, where)
    fits = fits and (reservation is None or reservation.fits)
    others = [c for c in _undominated(found, where) if c.exact != profile.exact][:ALTERNATIVES]
    alternatives = [_alternative(c, where, blocks, recipe.rows_per_step, more) for c in others]
    if not fits and offer:
        rest = sum(profile.resting.values())
        # As the smallest exact run's excess, and one more segment.
        allowed = 0 if where.on_cpu else more + settings_here().large_segment
        alternatives += offers(recipe, config, blocks, where, rates, target, peak, rest, allowed)
    return Plan(
        fits=fits,
        exact=profile.exact,
        profile=profile,
        places=where,
        peak_bytes=peak,
        seconds=seconds,
        why=(
            *_reasons(search, replace(profile.exact, offload=()), where, away=bool(profile.exact.offload)),
            *offloading.reasons(profile.exact, profile, blocks, where.near),
        ),
        alternatives=tuple(alternatives),
        disk_bytes=disk,
        host_bytes=peak if where.on_cpu else host,
        model=label or str(config.get("model_type")),
        blocks=blocks,
        rows=recipe.rows_per_step,
        notes=tuple(_notes(recipe, config, where, search, reservation) + _measured(profile) + _moot(recipe, profile)),
        rates=rates.source,
        tokens=where.count * recipe.train.batch_tokens,
        reservation=reservation,
        frontier=frontier(search, where, more, found) if "frontier" in also else (),
        decisions=explain(search, profile.exact, where) if "explain" in also else (),
        arena=arena.of_run(recipe, config, profile.exact, where) if "arena" in also else None,
    )


def compared(where: Places, tracked: int, policy: Policy, more: int) -> int:
    """Bytes to hold against the budget: resident ones on a CPU, reserved ones on a card."""
    return where.resident_peak(tracked, policy) if where.on_cpu else tracked + more


def device_rates(where: Places, recipe: Any, config: dict[str, Any]) -> Rates:
    """What the computing device reaches: measured here on a CPU, from the card's table else."""
    if where.on_cpu:
        return replace(probe(recipe, config), near=where.near)
    card, precision = where.card, recipe.precision
    tflops = card.fp32_tflops if precision == "fp32" else card.bf16_tflops
    if tflops is None:
        raise ModelError(
            f"precision {precision} on {card.name}", "no bfloat16 units", instead="precision=fp32, or a newer card"
        )
    return Rates(
        tflops * 1e12 * REACHED_FLOPS,
        card.bandwidth_gbs * 1e9 * REACHED_BANDWIDTH,
        f"{card.name}: half of {tflops:g} TFLOP/s and four fifths of {card.bandwidth_gbs:g} GB/s (card table)",
        call=CARD_CALL,
    )


def fits_elsewhere(recipe: Any, profile: MemoryProfile, where: Places) -> bool:
    """Whether the disk and, beside a card, the host hold what a run leaves there."""
    return _on_disk(recipe, profile, where) <= where.disk and (where.on_cpu or _on_host(profile, where) <= where.host)


def _on_disk(recipe: Any, profile: MemoryProfile, where: Places) -> int:
    return _disk(recipe, profile.kept_bytes) + where.text_bytes + profile.away.get("disk", 0)


def _on_host(profile: MemoryProfile, where: Places) -> int:
    """One process a card, on one machine: its host memory holds them all."""
    return where.count * (profile.away.get("host", 0) + (0 if where.on_cpu else where.baseline))


def _disk(recipe: Any, kept_bytes: int) -> int:
    """Checkpoints kept, and the one being written before the oldest is removed."""
    if recipe.checkpoint.every is None and not recipe.checkpoint.at_end:
        return 0
    kept = recipe.checkpoint.keep + 1 + (1 if recipe.eval and recipe.eval.keep_best else 0)
    saves = kept if recipe.checkpoint.every else 1
    return saves * kept_bytes


def _reasons(search: MixedSearch, exact: ExactChoices, where: Places, away: bool) -> list[str]:
    """What each decision saves against the next larger one, from what the search has simulated anyway."""
    row, mine = plain(exact), search.at(exact)
    blocks, count = search.blocks, len(exact.recompute)
    budget = format_bytes(search.budgets[exact.malloc][0])
    reasons = []
    if count:
        none = search.at(replace(exact, recompute=(), keep="nothing"))
        saved, cost = none.peak - mine.peak, mine.seconds / none.seconds - 1
        levels = "" if isinstance(exact.keep, str) else ", at levels of their own"
        reasons.append(
            f"recompute {count} of {blocks} blocks{levels}: saves {format_bytes(saved)}, costs {cost:.0%} time"
        )
    elif not away:
        reasons.append(f"no recompute: every activation fits in {budget}")
    if exact.micro_rows < search.recipe.rows_per_step and search.recipe.exact.micro_batch is None:
        larger = next(n for n in search.lattice.sizes() if n > exact.micro_rows)
        other = search.seen(replace(exact, micro_rows=larger, in_backward=False))
        if other is not None:
            more = other.peak - mine.peak
            reasons.append(f"micro-batch of {exact.micro_rows}: {larger} rows would take {format_bytes(more)} more")
    if exact.in_backward:
        held = search.seen(replace(exact, in_backward=False))
        passes = " in two passes, for the clipping norm" if search.recipe.train.clip else ""
        saves = "gradients are freed one by one"
        if held is not None:
            saved = held.peak - mine.peak
            saves = f"saves {format_bytes(saved)} of gradients"
        reasons.append(f"step in backward{passes}: {saves}")
    elif search.recipe.exact.in_backward is None:
        reasons.append("gradients held: they fit, and one backward per micro-batch is enough")
    if exact.malloc == "pool" and where.on_cpu:
        reasons.append(f"tensor pool: freed blocks serve the next tensors, {format_bytes(POOL_ROOM)} wait at the peak")
    elif where.on_cpu and len(search.budgets) > 1 and search.reusable(row):
        reuse, back = search.budgets["reuse"][0], search.budgets["return"][0]
        slower = search.slower(row, "return") - 1
        if exact.malloc == "reuse":
            reasons.append(f"freed memory is reused: {slower:.0%} faster than returning it, and it fits")
        else:
            reasons.append(
                f"freed memory returned to the system: room for {format_bytes(back - reuse)} more tensors, "
                f"about {slower:.0%} slower"
            )
    return reasons


def _undominated(found: list[Candidate], where: Places) -> list[Candidate]:
    """Those that nothing beats in both time and memory, fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.seconds, c.peak)):
        peak = compared(where, candidate.peak, candidate.exact.malloc, 0)
        if all(peak < compared(where, other.peak, other.exact.malloc, 0) for other in kept):
            kept.append(candidate)
    return kept


def _alternative(candidate: Candidate, where: Places, blocks: int, rows: int, more: int) -> Alternative:
    peak = compared(where, candidate.peak, candidate.exact.malloc, more)
    exact = candidate.exact
    overrides = (
        f"exact.micro_batch={exact.micro_rows}",
        *recompute_words(exact),
        *([f"exact.loss_chunk={exact.loss_chunk}"] if exact.loss_chunk else []),
        *([f"exact.mlp_chunk={exact.mlp_chunk}"] if exact.mlp_chunk else []),
        f"exact.in_backward={str(exact.in_backward).lower()}",
        *([f"exact.malloc={exact.malloc}"] if where.on_cpu else []),
        *offloading.overrides(exact),
    )
    return Alternative(
        exact.describe(blocks, rows), peak, candidate.seconds, peak <= where.device_budget, True, overrides
    )


def recompute_words(exact: ExactChoices) -> tuple[str, ...]:
    """What to type for the recomputed blocks and for what they keep."""
    again, keep = exact.recompute, exact.keep
    first = again == tuple(range(len(again)))
    blocks = str(len(again)) if first else str(list(again)).replace(" ", "")
    if not again or keep == "nothing":
        return (f"exact.recompute={blocks}",)
    return f"exact.recompute={blocks}", f"exact.keep={keep if isinstance(keep, str) else f'[{chr(44).join(keep)}]'}"


def _measured(profile: MemoryProfile) -> list[str]:
    if not profile.measured:
        return []
    return [f"measured on real tensors with random weights, not simulated: {profile.measured} depends on values"]


def _moot(recipe: Any, profile: Any) -> list[str]:
    """What the recipe asks for and the chosen blocks make pointless."""
    again, found = len(profile.exact.recompute), []
    if again and recipe.activations.pamm is not None:
        found.append(
            f"activations.pamm saves nothing in the {again} recomputed blocks, which keep their own input only; their "
            "gradients are approximate all the same, so that the plan does not change the mathematics"
        )
    if again and recipe.optimizer.name == "compact":
        found.append(
            f"optimizer compact saves gradients and states in the {again} recomputed blocks, and no activations: they "
            "keep their own input only"
        )
    return found


def _notes(
    recipe: Any, config: dict[str, Any], where: Places, search: Search, reservation: Reservation | None
) -> list[str]:
    notes = []
    if reservation is not None:
        notes += assumptions(where, reservation)
    if where.count > 1:
        notes.append(
            f"{where.count} cards by formula, not simulated together: each takes {recipe.rows_per_step} of "
            f"{where.count * recipe.rows_per_step} rows; weights, gradients and states are sharded (ZeRO-3, FSDP2), "
            "two units of weights and one of gradients are whole at a time; links as PCIe 4.0; this version trains on "
            "none of them"
        )
    dropout = dropout_of(config)
    if dropout:
        notes.append("dropout of the config set to 0: " + ", ".join(f"{k}={v:g}" for k, v in dropout.items()))
    positions = int(config.get("max_position_embeddings") or recipe.data.seq_len)
    if recipe.data.seq_len > positions:
        notes.append(
            f"rows of {recipe.data.seq_len:,} tokens on a model of {positions:,} positions: right in memory and time, "
            "but the model never saw such angles, and its loss begins high"
        )
    if recipe.train.clip is None:
        notes.append("no gradient clipping")
    layers = recipe.train.layers
    if layers is not None:
        notes.append(
            f"{layers.active} of {search.blocks} blocks train at a time: the costliest {layers.active} are simulated"
        )
    if recipe.data.packing:
        notes.append("packed rows are simulated as one document, their costliest split: most bytes, most seconds")
    if where.on_cpu:
        notes.append(
            f"host: process baseline {format_bytes(where.baseline)} measured here; what the allocator and libraries "
            "add is an allowance (docs: memory)"
        )
    if recipe.precision == "bf16":
        notes.append("bf16 gradients of several micro-batches are added in bf16: one rounding per micro-batch")
    return notes
