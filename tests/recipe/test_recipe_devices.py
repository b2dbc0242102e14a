from __future__ import annotations

import pytest

from skimp.core.errors import RecipeError
from skimp.recipe import cards, resolve_gpu
from skimp.recipe.devices import GIB, card_names, plain


def test_the_table_is_sane() -> None:
    assert len(cards()) >= 18
    for card in cards().values():
        assert 0.9 * card.size_gb * GIB < card.usable_bytes <= 1.0 * card.size_gb * GIB, card.name
        assert 0 < card.context_bytes < 10**9
        assert card.budget_bytes == card.usable_bytes - card.context_bytes
        assert card.bf16_tflops is None or card.bf16_tflops > card.fp32_tflops
        assert card.bandwidth_gbs > 200
        assert card.name in card.basis
    spellings = [plain(name) for name in cards()]
    assert len(set(spellings)) == len(spellings)
    assert set(card_names().values()) == set(cards())


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("rtx-4090", "rtx-4090", 1),
        ("RTX 4090", "rtx-4090", 1),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 1),
        ("4090", "rtx-4090", 1),
        ("Tesla T4", "t4", 1),
        ("h100", "h100-80", 1),
        ("a100-80gb", "a100-80", 1),
        ("AMD Instinct MI300X", "mi300x", 1),
        ("2x rtx-3090", "rtx-3090", 2),
        ("8x80GB", "80GB", 8),
        ("8*80 gb", "80GB", 8),
        ("24GB", "24GB", 1),
    ],
)
def test_spellings(text: str, name: str, count: int) -> None:
    gpus = resolve_gpu(text)
    assert (gpus.card.name, gpus.count) == (name, count)


def test_a_size_promises_no_more_than_any_card_sold_so() -> None:
    for size in {card.size_gb for card in cards().values()}:
        generic = resolve_gpu(f"{size}GB").card
        same = [card for card in cards().values() if card.size_gb == size]
        assert generic.budget_bytes == min(card.budget_bytes for card in same)
        assert generic.bandwidth_gbs == min(card.bandwidth_gbs for card in same)
        assert f"{size} GB" in generic.basis
    assert resolve_gpu("24GB").card.usable_bytes < 24 * 10**9


def test_a_size_no_card_has_is_derived_and_says_so() -> None:
    card = resolve_gpu("20GB").card
    assert card.usable_bytes == int(0.9 * 20 * GIB)
    assert "no known card has 20 GB" in card.basis
    smallest = min(c.usable_bytes / (c.size_gb * GIB) for c in cards().values())
    assert card.usable_bytes / (20 * GIB) <= smallest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx-4099", ["no such card", "rtx-4090"]),
        ("", ["no such card"]),
        ("0x80GB", ["no cards", "8x80GB"]),
        ("5000GB", ["no card has that size"]),
        ("potato", ["no such card", "24GB"]),
    ],
)
def test_unknown_cards(text: str, said: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_gpu(text)
    for part in said:
        assert part in str(caught.value)
