"""An adapter on a model cut to a few blocks: what small simulations stand for must look alike in every block.

A search simulates one to three blocks and extends them to all. Targets such as `layers.7.mlp.up_proj`, or ranks that
differ between layers, would then be missed or refused. The small model therefore gets every addition that any block
has, at the largest rank: never under. The plan's last word is a full simulation of the recipe as it is.
"""

from __future__ import annotations

from typing import Any

from skimp.core.structure import read_structure
from skimp.run.adapt import few_blocks
from skimp.run.build import DTYPES
from skimp.run.skeleton import skeleton


def for_few_blocks(recipe: Any, config: dict[str, Any], active: int = 1) -> Any:
    """The recipe that small simulations use; itself where its targets are the same in every block.

    Where blocks train in turn, `active` of them do: there may be fewer than the recipe has active at a time.

    Raises:
        SkimpError: targets that match nothing or only in part, or an adapter for another base: before any search.
    """
    if recipe.train.layers is not None:
        few = recipe.train.layers.model_copy(update={"active": active})
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"layers": few})})
    asked = recipe.adapter
    if asked is None:
        return recipe
    model = skeleton(config, DTYPES[recipe.precision])
    update = few_blocks(recipe, model, read_structure(model))
    return recipe.model_copy(update={"adapter": asked.model_copy(update=update)}) if update else recipe
