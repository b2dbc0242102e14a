"""From `train.layers` of a recipe to the sampler of a run; a simulated run gets the costliest sets to go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from skimp.core.errors import ConflictError
from skimp.core.exact import ExactChoices
from skimp.core.structure import Structure
from skimp.steps.draws import Draw, Fixed, Ordered, Systematic, Uniform, costliest
from skimp.steps.layers import LayerSampler
from skimp.steps.outliers import outlier_scores


def layer_sampler(
    recipe: Any,
    exact: ExactChoices,
    model: nn.Module,
    structure: Structure,
    named: Sequence[tuple[str, nn.Parameter]],
    optimizer: Any,
    simulated: bool,
) -> LayerSampler | None:
    """The sampler that `train.layers` asks for, or None.

    Args:
        recipe, exact: the run. model, structure, named, optimizer: of it.
        simulated: go through the costliest sets instead of those that the seed draws.
    """
    asked = recipe.train.layers
    if asked is None:
        return None
    count, seed = len(structure.blocks), recipe.train.seed
    sets = costliest(count, asked.active, asked.embeddings, exact.recompute)
    draw: Draw | None
    if asked.name == "owlore":
        draw = None
    elif simulated:
        draw = Fixed(sets)
    elif asked.name == "badam":
        draw = Ordered(seed, count, asked.active, asked.order)
    else:
        draw = Uniform(seed, count, asked.active)

    def score(batches: Sequence[Any]) -> tuple[Draw, list[float]]:
        found = outlier_scores(model, structure.blocks, sampler.forward, batches, asked.threshold)
        weighted = Systematic(seed, tuple(found), asked.active)
        if not simulated:
            return weighted, found
        weighted.at(0)  # a real run draws here: the same operators, and then the costliest blocks
        return Fixed(sampler.sets), found

    sampler = LayerSampler(
        named,
        structure,
        optimizer,
        draw,
        every=asked.every,
        on_switch=asked.on_switch,
        warmup=asked.warmup,
        embeddings=asked.embeddings,
        head=asked.head,
        score=score,
        provisional=sets[0],
        name=asked.name,
    )
    sampler.sets = sets
    return sampler


def restore_layers(run: Any, state: Mapping[str, Any]) -> None:
    """The sampler's part of a checkpoint; the sets themselves follow from the seed."""
    asked = run.recipe.train.layers
    run.layers.load_state_dict(state, lambda scores: Systematic(run.recipe.train.seed, tuple(scores), asked.active))


def check_layers(recipe: Any, structure: Structure) -> None:
    """More active blocks than the model has cannot be.

    Raises:
        ConflictError: before any weight is loaded.
    """
    asked, blocks = recipe.train.layers, len(structure.blocks)
    if asked is None:
        return
    if asked.active > blocks:
        raise ConflictError(
            f"train.layers.active={asked.active}",
            f"a model of {blocks} blocks",
            "a block trains once or not at all",
            [f"train.layers.active={max(1, blocks // 4)}", "train.layers=null: all blocks train"],
        )
