"""When nothing exact fits: the approximate ways, each simulated, smallest first, with what is known of their price.

skimp never takes one of these by itself: they change the mathematics. Each offer is an override to type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skimp.core.errors import SkimpError
from skimp.core.exact import ExactChoices
from skimp.core.registry import conflict_of, load, methods
from skimp.plan.cost import Rates
from skimp.plan.extend import extend_line
from skimp.plan.places import Places, budgets
from skimp.plan.plan import Alternative
from skimp.plan.reserve import reserve
from skimp.plan.search import Search
from skimp.recipe.adapter import Adapter
from skimp.recipe.weights import Weights
from skimp.run.build import DTYPES, rule_name

#: (what to change, in words with the known effect, as overrides, changes to the recipe)
WAYS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    (
        "8-bit optimizer states (loss within 1-2 % of fp32 states in the published runs)",
        ("optimizer=adamw8bit",),
        {"optimizer": "adamw8bit"},
    ),
    (
        "bf16 weights with stochastic rounding, bf16 states (needs a higher-precision check at small learning rates)",
        ("precision=bf16", "optimizer=adamw"),
        {"precision": "bf16", "optimizer": "adamw"},
    ),
    (
        "bf16 weights with stochastic rounding, 8-bit states",
        ("precision=bf16", "optimizer=adamw8bit"),
        {"precision": "bf16", "optimizer": "adamw8bit"},
    ),
    (
        "LoRA, r 16 on all linear layers: the model stays frozen, small additions train",
        ("adapter=lora",),
        {"adapter": "lora"},
    ),
    (
        "LoRA on a base stored in bf16",
        ("adapter=lora", "precision=bf16"),
        {"adapter": "lora", "precision": "bf16"},
    ),
    (
        "the frozen base in NF4, 4.13 bits a weight (each off by about 9 %; the adapter trains against it)",
        ("model.weights=nf4",),
        {"weights": "nf4"},
    ),
    (
        "LoRA on a base kept in NF4, 4.13 bits a weight",
        ("adapter=lora", "model.weights=nf4"),
        {"adapter": "lora", "weights": "nf4"},
    ),
    ("half the sequence, same tokens a step: other text is seen together", ("data.seq_len=HALF",), {"seq": 0.5}),
)
#: Update rules of the registry that are simulated besides, those with the smallest states; a third of a second each.
RULES = 3


def ways(recipe: Any, config: dict[str, Any]) -> list[tuple[str, tuple[str, ...], dict[str, Any]]]:
    """The combinations above, and the registered approximate rules whose states of one layer are smallest."""
    named = {change.get("optimizer") for _, _, change in WAYS} | {recipe.optimizer.name}
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 256)
    shape = torch.Size((int(config.get("intermediate_size") or 4 * hidden), hidden))
    found = []
    for name, known in methods().items():
        wanted = known.kind == "update rule" and not known.exact and "optimizer" in known.attacks
        if not wanted or name in named or rule_name(recipe) == name or recipe.optimizer.name in known.conflicts:
            continue
        size = _state_bytes(recipe, name, shape)
        if size is not None:
            found.append((size, name, known.summary.rstrip(".")))
    chosen = sorted(found)[:RULES]
    return [*WAYS, *((label, (f"optimizer={name}",), {"optimizer": name}) for _, name, label in chosen)]


def _state_bytes(recipe: Any, name: str, shape: torch.Size) -> int | None:
    """Bytes of a rule's states for one matrix, without making any; None where the rule will not take it so."""
    kind = DTYPES[recipe.precision] if recipe.adapter is None else torch.float32
    try:
        rule = load(name, "update rule")
        lone = nn.Parameter(torch.empty(shape, dtype=kind, device="meta"))
        made = rule([lone], lr=1e-5, **recipe.optimizer.renamed(name).options())
        return int(made.bytes_of(lone))
    except SkimpError:
        return None


#: Blocks of a model whose every offer is simulated in full, which takes a fraction of a second.
FEW = 12


def offers(
    recipe: Any,
    config: dict[str, Any],
    blocks: int,
    where: Places,
    rates: Rates,
    target: str,
    least: int,
    rest: int,
    more: int = 0,
) -> list[Alternative]:
    """Simulate each way at its smallest exact point, so that what is offered is what could be reached.

    A way that does not get below `least`, the smallest exact run, is not offered. A shorter sequence shrinks nothing
    of what is always there (`rest`: weights and optimizer states), so it is not even tried where that is too much.
    On a card `more` bytes are allowed for what its allocator takes beyond the tensors; a model of few blocks is
    replayed instead.
    """
    found: list[Alternative] = []
    for label, overrides, change in ways(recipe, config):
        changed = _changed(recipe, change)
        if changed is None or ("seq" in change and rest > where.tensor_budget()):
            continue
        if "adapter" in change and any(a.fits and "adapter=lora" in a.overrides for a in found):
            continue  # the base may keep its precision
        allowed = budgets(where, changed)
        search = Search(changed, config, blocks, allowed, rates, target, where.count)
        try:
            best = smallest(search)
        except SkimpError:
            if "optimizer" not in change or change["optimizer"] in {c.get("optimizer") for _, _, c in WAYS}:
                raise
            continue  # a rule of the registry that cannot go with this recipe, by its own words
        if where.on_cpu:
            peak = min(where.resident_peak(best[0], p) for p in allowed)
        elif blocks <= FEW and where.count == 1:
            exact = search.exact(*smallest_row(search))
            peak = max(best[0], reserve(changed, config, exact, where, target=target).reserved)
        else:
            peak = best[0] + more
        typed = tuple(o.replace("HALF", str(recipe.data.seq_len // 2)) for o in overrides)
        found.append(Alternative(label, peak, best[1], peak <= where.device_budget, False, typed))
    found = [a for a in found if a.fits or a.peak_bytes < 0.98 * least]
    return sorted(found, key=lambda a: (not a.fits, a.peak_bytes))


def smallest(search: Search) -> tuple[int, float]:
    """Peak and seconds of the recipe's smallest run: every block recomputed (or as pinned), small chunks, gradients
    freed in backward unless the recipe pins otherwise. Two depths fix the line."""
    row, again = smallest_row(search)
    kept = search.blocks - again
    if kept:
        extension = search.row(row)
        peak = extension.peak(kept, search.blocks - kept) + search.further
        return peak, extension.seconds.at(kept, search.blocks - kept)
    one, two = (search.small(row, depth, depth) for depth in (1, 2))
    more = search.blocks - 1
    return extend_line(one, two, more) + search.further, one.seconds + more * (two.seconds - one.seconds)


def smallest_row(search: Search) -> tuple[ExactChoices, int]:
    """The row of the recipe's smallest run, and how many blocks it recomputes."""
    in_backward = search.recipe.exact.in_backward is not False
    roots = list(search.lattice.roots(in_backward)) or list(search.lattice.roots(in_backward=False))
    pinned = search.pinned_count()
    return search.lattice.least(roots[0]), search.blocks if pinned is None else pinned


def _changed(recipe: Any, change: dict[str, Any]) -> Any | None:
    """The recipe with the change, or None when it is so already."""
    update: dict[str, Any] = {}
    if "adapter" in change:
        if recipe.adapter is not None or recipe.model.init == "scratch" or recipe.train.layers is not None:
            return None
        update["adapter"] = Adapter.model_validate(change["adapter"])
    if "weights" in change:
        adapter = update.get("adapter", recipe.adapter)
        if adapter is None or recipe.model.weights is not None or conflict_of(adapter.name, change["weights"]):
            return None
        kept = Weights.model_validate(change["weights"])
        update["model"] = recipe.model.model_copy(update={"weights": kept})
    if "optimizer" in change:
        if recipe.optimizer.name != change["optimizer"]:
            update["optimizer"] = recipe.optimizer.renamed(change["optimizer"])
        elif "precision" not in change:
            return None
    if "precision" in change:
        full = recipe.adapter is not None and (recipe.adapter.embeddings or recipe.adapter.head)
        if full and change.get("optimizer") == "adamw":
            return None  # no form of it takes float32 additions and a bfloat16 matrix
        if recipe.precision == change["precision"]:
            if not update or "adapter" in change:
                return None
        else:
            update["precision"] = change["precision"]
    if "seq" in change:
        seq = recipe.data.seq_len
        if seq < 256 or seq % 2:
            return None
        update["data"] = recipe.data.model_copy(update={"seq_len": seq // 2})
    return recipe.model_copy(update=update)
