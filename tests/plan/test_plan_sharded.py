"""Several cards by formula: shares are ZeRO-3's, rows divide, one card is the plan without any formula."""

from __future__ import annotations

from typing import Any

import pytest

from skimp.core.errors import RecipeError
from skimp.core.exact import ExactChoices
from skimp.plan.make import make_plan
from skimp.plan.places import places
from skimp.plan.sharded import CUT, largest_unit, one_card, sharded
from skimp.plan.simulate import simulate
from skimp.recipe import load_recipe

BLOCKS = 4
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def recipe(rows: int = 8) -> Any:
    values = {
        "model": "tiny",
        "data": {"train": "pydoc", "seq_len": 64, "validation": None},
        "output": "runs/sharded",
        "train": {"steps": 2, "batch_tokens": 64 * rows},
        "eval": None,
    }
    return load_recipe(values)


def profile(cards: int, rows: int = 8) -> Any:
    return simulate(one_card(recipe(rows), cards), ExactChoices(1), CONFIG, target="cuda", steps=1, cards=cards)


def test_one_card_is_the_plan_without_a_formula() -> None:
    whole = profile(1)
    assert sharded(whole, 1, 10**9) is whole
    assert one_card(recipe(), 1) == recipe()


@pytest.mark.parametrize("cards", [2, 8])
def test_states_weights_and_gradients_are_shares_and_the_rest_is_one_cards_own(cards: int) -> None:
    """16 bytes a parameter over N cards, in float32: 4 of weights, 4 of gradients, 8 of states; and three units."""
    whole, part = profile(1, 8 // cards), profile(cards)
    unit = largest_unit(CONFIG, whole.parameters, BLOCKS, 4)
    for name in CUT:
        assert part.resting.get(name, 0) == -(-whole.resting.get(name, 0) // cards)
    place = max(whole.shares, key=lambda p: sum(whole.shares[p]))
    cut = dict(zip(whole.peak.by_category, whole.shares[place], strict=True))
    expected = sum(-(-size // cards) if name in CUT else size for name, size in cut.items()) + 3 * unit
    assert part.places[place] == expected
    assert part.peak.total == max(part.places.values()) == sum(part.peak.by_category.values())
    assert part.kept_bytes == whole.kept_bytes
    assert part.resting["optimizer"] == 8 * whole.parameters // cards


def test_the_largest_unit_is_the_embedding_or_a_block() -> None:
    """A block: 4 x 64 x 64 of attention, 3 x 64 x 192 of the MLP, two norms of 64; one more norm for all four."""
    block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64
    parameters = 2 * 512 * 64 + BLOCKS * block + 64
    assert profile(1).parameters == parameters
    assert largest_unit(CONFIG, parameters, BLOCKS, 4) == 4 * (block + 64 // BLOCKS)
    assert largest_unit({**CONFIG, "vocab_size": 10**6}, parameters, BLOCKS, 2) == 2 * 64 * 10**6


def test_rows_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(RecipeError, match="every card takes the same number of rows") as caught:
        one_card(recipe(9), 4)
    assert caught.value.instead == ["train.batch_tokens=512"]
    with pytest.raises(RecipeError, match="batch_tokens=256"):
        one_card(recipe(2), 4)


def test_a_plan_for_several_cards_says_that_it_is_a_formula() -> None:
    where = places(recipe(), CONFIG, gpu="2x24GB")
    assert where.count == 2
    plan = make_plan(recipe(), CONFIG, where=where, offer=False)
    assert plan.fits
    assert any("by formula" in note for note in plan.notes)
    assert plan.tokens == 8 * 64
    assert plan.as_dict()["places"]["device"]["name"].startswith("2 x ")
