"""An extended profile is the full simulation's, number by number, or there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_extend import CONFIGS, LATTICE, ROW, recipe

from skimp.core.exact import ExactChoices
from skimp.plan.extend import CORNERS
from skimp.plan.extended import PROOF, extended
from skimp.plan.profile import MemoryProfile
from skimp.plan.simulate import simulate

EVALUATED = ("eval.tokens=64", "data.validation=0.5")


def described(*overrides: str) -> Any:
    """The recipe of the extension's tests, with an evaluation."""
    found = recipe(*overrides)
    return found.model_copy(update={"eval": type(found).model_fields["eval"].default_factory()})


def small(recipe_: Any, row: ExactChoices, config: dict[str, Any], kept: int, recomputed: int) -> MemoryProfile:
    exact = replace(row, recompute=tuple(range(recomputed)))
    return simulate(recipe_, exact, config, steps=1, blocks=kept + recomputed, short=True, evaluate=True)


def both(style: str, name: str, kept: int, recomputed: int) -> tuple[MemoryProfile | None, MemoryProfile]:
    row, overrides = LATTICE[name]
    recipe_, config = described(*overrides), CONFIGS[style]
    corners = [small(recipe_, row, config, *at) for at in CORNERS]
    proof = small(recipe_, row, config, *PROOF)
    exact = replace(row, recompute=tuple(range(recomputed)))
    return extended(corners, proof, exact, kept, recomputed), small(recipe_, row, config, kept, recomputed)


def same(found: MemoryProfile | None, full: MemoryProfile) -> None:
    assert found is not None
    assert found.peak.total == full.peak.total
    assert found.peak.by_category == full.peak.by_category
    assert found.peak.phase == full.peak.phase
    assert found.peak.operator == full.peak.operator
    assert found.phases == full.phases
    assert found.resting == full.resting
    assert found.seconds == pytest.approx(full.seconds, rel=1e-9)
    for number in ("flops", "parameters", "trained", "kept_bytes", "exact"):
        assert getattr(found, number) == getattr(full, number), number


@pytest.mark.parametrize(
    ("style", "name", "kept", "recomputed"),
    [("llama", "held", 12, 0), ("llama-tied", "in backward", 3, 8), ("gpt2", "held", 0, 9)],
)
def test_an_extended_profile_is_the_full_one(style: str, name: str, kept: int, recomputed: int) -> None:
    same(*both(style, name, kept, recomputed))


@pytest.mark.slow
@pytest.mark.parametrize("style", CONFIGS)
@pytest.mark.parametrize("name", LATTICE)
@pytest.mark.parametrize(("kept", "recomputed"), [(12, 0), (11, 1), (5, 7), (1, 11), (0, 12)])
def test_an_extended_profile_is_the_full_one_everywhere(style: str, name: str, kept: int, recomputed: int) -> None:
    same(*both(style, name, kept, recomputed))


def test_a_block_of_another_kind_is_no_proof() -> None:
    recipe_, config = described(), CONFIGS["llama"]
    corners = [small(recipe_, ROW, config, *at) for at in CORNERS]
    wider = small(recipe_, ROW, {**config, "intermediate_size": 161}, *PROOF)
    assert extended(corners, wider, ROW, 12, 0) is None
