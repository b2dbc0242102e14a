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
from skimp.run.build import DTYPES
from skimp.run.techniques import rule_name

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
        "CompAct: layers keep a random quarter of their inputs; gradients and Adam's states are a quarter (perplexity "
        "1-16 % above full training in the published runs)",
        ("optimizer=compact", "train.clip=null"),
        {"optimizer": "compact"},
    ),
    (
        "PAMM: queries, keys and values keep one of 512 tokens of their input (perplexity as full training's in the "
        "published runs)",
        ("activations.pamm=512",),
        {"pamm": 512},
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
        "the frozen base in int8, a scale a group of weights (each off by half a 127th of its group's largest at most)",
        ("model.weights=int8",),
        {"weights": "int8"},
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
    (
        "LoRA on a base kept in NF4, computed in bf16",
        ("adapter=lora", "precision=bf16", "model.weights=nf4"),
        {"adapter": "lora", "precision": "bf16", "weights": "nf4"},
    ),
    (
        "what blocks keep for backward in 8 bits (the first loss is the same to the bit; gradients are of numbers off "
        "by a 510th of their group's range at most)",
        ("activations.kept_bits=8",),
        {"kept": 8},
    ),
    (
        "derivatives of activations in 4 bits (the forward is exact, gradients are not; published for adapters of "
        "vision models, at 98.7 % of full fine-tuning's accuracy)",
        ("activations.derivative=4",),
        {"derivative": 4},
    ),
    (
        "block-sparse attention: windows and strides (on par at 1.3B and 7B when trained so from the start; a dense "
        "checkpoint must get used to it)",
        ("attention={name: s2-attention, local: 8, stride: STRIDE}",),
        {"attention": "s2-attention"},
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
    tried: list[Any] = []
    for label, overrides, change in ways(recipe, config):
        typed = _typed(recipe, overrides, config)
        changed = _changed(recipe, change, typed)
        if changed is None or changed in tried or ("seq" in change and rest > where.tensor_budget()):
            continue
        if "adapter" in change and any(a.fits and "adapter=lora" in a.overrides for a in found):
            continue  # the base may keep its precision
        tried.append(changed)
        allowed = budgets(where, changed)
        search = Search(changed, config, blocks, allowed, rates, target, where.count)
        try:
            best = smallest(search)
        except SkimpError:
            continue  # it cannot go with this recipe, by its own words
        if where.on_cpu:
            peak = min(where.resident_peak(best[0], p) for p in allowed)
        elif blocks <= FEW and where.count == 1:
            exact = search.exact(*smallest_row(search))
            peak = max(best[0], reserve(changed, config, exact, where, target=target).reserved)
        else:
            peak = best[0] + more
        if recipe.adapter is not None and change == {"precision": "bf16", "optimizer": "adamw"}:
            label = "the frozen base in bf16; the additions and their states stay float32"
        elif recipe.adapter is not None and change == {"precision": "bf16", "optimizer": "adamw8bit"}:
            label = "the frozen base in bf16, float32 additions with 8-bit states"
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


def _changed(recipe: Any, change: dict[str, Any], overrides: tuple[str, ...]) -> Any | None:
    """The recipe as it reads with the overrides typed; None when it is so already, or where it does not take them."""
    from skimp.recipe import load_recipe

    adapter = recipe.adapter
    if "adapter" in change and (adapter or recipe.model.init == "scratch" or recipe.train.layers is not None):
        return None
    if "weights" in change:
        name = adapter.name if adapter is not None else change.get("adapter")
        if name is None or recipe.model.weights is not None or conflict_of(name, change["weights"]):
            return None
    if "pamm" in change and recipe.exact.recompute is None:
        return None  # the smallest run recomputes every block, where it saves nothing
    if recipe.attention is not None and "attention" in change:
        return None
    if "seq" in change and (recipe.data.seq_len < 256 or recipe.data.seq_len % 2):
        return None
    try:
        found = load_recipe(recipe.as_dict(), overrides)
    except SkimpError:
        return None  # in the recipe's own words: other keys of it and this one contradict each other
    return None if found == recipe else found


def _typed(recipe: Any, overrides: tuple[str, ...], config: dict[str, Any]) -> tuple[str, ...]:
    """What there is to type: a rule or a precision that the recipe has already keeps its keys."""
    there = {f"optimizer={recipe.optimizer.name}", f"precision={recipe.precision}"}
    # Heads stride over a residue each: more residues than key heads would leave some to nobody.
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or config.get("n_head") or 1
    values = {"HALF": str(recipe.data.seq_len // 2), "STRIDE": str(min(8, int(heads)))}
    found = [word for word in overrides if word not in there]
    for name, value in values.items():
        found = [word.replace(name, value) for word in found]
    return tuple(found)
