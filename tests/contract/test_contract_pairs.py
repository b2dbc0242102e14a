"""The pair matrix: any two methods run together, or are refused for a reason of mathematics with a way out."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from contract_pairs import (
    BESIDE,
    IN_A_LOOP,
    PAIRS,
    REFUSED,
    RUN,
    SWITCHES,
    loop_losses,
    losses,
    plain_losses,
    plain_of,
    technique_of,
)
from contract_rows import FAMILY, Technique, threads

from skimp.core.errors import ConflictError
from skimp.core.registry import check_together, conflict_of, methods
from skimp.kernels.native import library
from skimp.run.build import Run

#: A walk through all methods and back again: each meets the next one it can run with, three places on.
_NAMES = sorted(methods())
_WALK = {
    next(pair for k in range(3, len(_NAMES)) if (pair := tuple(sorted((name, (_NAMES * 2)[i + k])))) in RUN)
    for i, name in enumerate(_NAMES)
}
FAST = [pair for pair in RUN if pair in _WALK or frozenset(pair) in {*BESIDE, *IN_A_LOOP}]
SLOW = [pair for pair in RUN if pair not in FAST]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def check(pair: tuple[str, str]) -> None:
    if any(name.startswith("fused-") for name in pair) and not library.available():
        pytest.skip(library.why())
    if frozenset(pair) in IN_A_LOOP:
        assert loop_losses(pair)[-1] == pytest.approx(plain_losses(("precision=bf16",), None)[-1], rel=5e-3)
        return
    technique = technique_of(pair)

    def both(run: Run) -> None:
        for name in pair:
            assert SWITCHES[name].on(run), f"{name} is not on"

    found = losses(technique, both)
    plain = plain_of(technique)
    # Every exact method may only reorder sums; bfloat16 rounds each of them to 8 bits, at random in the weights.
    half = "precision=bf16" in technique.overrides
    # A basis turns by that rounding over the gap between two singular values, and Adam in it does not commute with
    # turns: measured up to 3e-5 where gradients of a tiny model have gaps of a hundredth.
    # Lion moves by the sign of a blend, which rounding turns where the blend is nearly 0, and an orthogonal update
    # magnifies weak directions: measured up to 5e-6.
    turning = not ({"lion", "muon", "dion"} | FAMILY.keys()).isdisjoint(pair)
    # What a run keeps differs with what is fused, recomputed and chunked, and so does what coding rounds of it.
    # And tokens that stand for others are those of a micro-batch.
    rounding = "coded-activations" in pair or pair == ("first-order", "pamm")
    tolerance = 2e-3 if half else 1e-3 if rounding else 1e-4 if turning else 2e-6
    assert found == pytest.approx(plain_losses(plain.overrides, plain.documents), rel=tolerance)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("pair", FAST, ids="+".join)
def test_pair(pair: tuple[str, str]) -> None:
    check(pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", SLOW, ids="+".join)
def test_pair_of_the_whole_matrix(pair: tuple[str, str]) -> None:
    check(pair)


def test_every_method_can_be_switched_on() -> None:
    assert set(methods()) <= set(SWITCHES), "a new method: say in SWITCHES how it is switched on"
    assert {name for pair in FAST for name in pair} == set(methods())


def test_two_rules_are_alternatives_and_refused_with_a_way_out() -> None:
    with pytest.raises(ConflictError, match=r"a parameter moves once a step"):
        check_together(["adamw8bit", "recompute", "adamw"])


def test_refusals_are_few() -> None:
    """Of pairs that two keys of a recipe could ask for: values of one key are no pair."""
    pairs, refused = ([p for p in every if not _one_key(p)] for every in (PAIRS, REFUSED))
    assert len(refused) < 0.1 * len(pairs), f"{len(refused)} of {len(pairs)} pairs are refused"


def _one_key(pair: tuple[str, str]) -> bool:
    """Both are values of the same key, such as `optimizer:` or `train: {layers:`."""
    one, other = (re.match(r"(\w+: \{)?\w+:", methods()[name].snippet) for name in pair)
    return one is not None and other is not None and one[0] == other[0]


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_a_refusal_says_why_and_what_instead(pair: tuple[str, str]) -> None:
    """By the registry's own check, as every run makes it; a missing implementation is no reason."""
    conflict = conflict_of(*pair)
    assert conflict is not None
    one, other = (methods()[name] for name in pair)
    sides = [not {b.name, b.kind}.isdisjoint(a.conflicts) for a, b in ((one, other), (other, one))]
    assert sides[0] != sides[1], "said once, on one side: two reasons would drift apart"
    for names in (pair, pair[::-1]):
        with pytest.raises(ConflictError) as caught:
            check_together(list(names))
        assert caught.value.why == conflict.reason
        assert caught.value.instead
    assert len(conflict.reason) > 30
    assert not re.search(r"implement|support|not yet|available", conflict.reason)


def test_the_matrix_can_fail() -> None:
    """A run that lacks one of the two is seen."""

    def on(run: Run) -> None:
        assert SWITCHES["recompute"].on(run), "recompute is not on"

    with pytest.raises(AssertionError, match="recompute is not on"):
        losses(Technique({"micro_rows": 3}), on)
