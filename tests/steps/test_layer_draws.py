"""Which blocks train: shares of the periods as declared, every block once a round, the same again for a seed."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import combinations

import pytest
import torch
from torch import nn

from skimp.steps.draws import Fixed, Ordered, Systematic, Uniform, costliest, inclusion
from skimp.steps.outliers import outlier_scores, percent_above

DRAWS = 3000
#: OwLore's shape of scores: two heavy blocks at the bottom, a light middle, a last block that rises.
WEIGHTS = (0.268, 0.295, 0.127, 0.06, 0.018, 0.0, 0.018, 0.08)


def shares(draw: Uniform | Systematic, count: int) -> list[float]:
    found: Counter[int] = Counter()
    for period in range(DRAWS):
        found.update(draw.at(period))
    return [found[i] / DRAWS for i in range(count)]


def z(found: float, expected: float) -> float:
    if expected in (0.0, 1.0):
        return 0.0 if found == expected else math.inf
    return abs(found - expected) / math.sqrt(expected * (1 - expected) / DRAWS)


def test_uniform_blocks_are_drawn_equally_often() -> None:
    found = shares(Uniform(3, 7, 2), 7)
    assert max(z(f, 2 / 7) for f in found) < 4
    assert sum(found) == pytest.approx(2.0)


def test_weighted_blocks_are_drawn_as_often_as_declared() -> None:
    """By systematic sampling the share is active x weight / sum, capped at 1, exactly; per block by a binomial z."""
    declared = inclusion(WEIGHTS, 3)
    found = shares(Systematic(5, WEIGHTS, 3), len(WEIGHTS))
    assert max(z(f, d) for f, d in zip(found, declared, strict=True)) < 4
    assert min(found) > 0
    assert sum(found) == pytest.approx(3.0)


def test_drawing_one_after_the_other_by_weight_would_be_seen() -> None:
    """The released way: without replacement, weights of the rest. Its shares are not active x weight / sum."""
    dice, found = random.Random(0), [0] * len(WEIGHTS)
    for _ in range(DRAWS):
        left = list(range(len(WEIGHTS)))
        for _ in range(3):
            block = dice.choices(left, [WEIGHTS[i] for i in left])[0]
            left.remove(block)
            found[block] += 1
    declared = inclusion(WEIGHTS, 3)
    assert max(z(f / DRAWS, d) for f, d in zip(found, declared, strict=True)) > 4


def test_inclusion_is_capped_and_what_is_above_goes_to_the_others() -> None:
    found = inclusion((8.0, 1.0, 1.0), 2)
    assert found == pytest.approx([1.0, 0.5, 0.5])
    assert sum(inclusion(WEIGHTS, 5)) == pytest.approx(5.0)
    assert inclusion((0.0, 0.0), 1) == [0.5, 0.5]
    assert inclusion(WEIGHTS, len(WEIGHTS)) == pytest.approx([1.0] * len(WEIGHTS))


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
@pytest.mark.parametrize("active", [1, 2, 3])
def test_a_round_meets_every_block_once(order: str, active: int) -> None:
    draw = Ordered(1, 7, active, order)  # type: ignore[arg-type]
    periods = -(-7 // active)
    for turn in range(3):
        met = [b for p in range(periods) for b in draw.at(turn * periods + p)]
        assert sorted(met) == list(range(7))
    first = draw.at(0)
    if order != "random":
        assert first == (tuple(range(active)) if order == "ascending" else tuple(range(7 - active, 7)))


def test_a_seed_draws_the_same_and_another_does_not() -> None:
    for make in (lambda s: Uniform(s, 9, 3), lambda s: Ordered(s, 9, 1), lambda s: Systematic(s, WEIGHTS, 2)):
        one, again, other = ([make(s).at(p) for p in range(40)] for s in (4, 4, 5))
        assert one == again != other


def test_sets_are_distinct_and_ascending() -> None:
    for draw in (Uniform(0, 8, 5), Systematic(0, WEIGHTS, 5)):
        for period in range(200):
            found = draw.at(period)
            assert len(set(found)) == 5
            assert list(found) == sorted(found)


def test_fixed_sets_come_in_turn() -> None:
    draw = Fixed(((0, 1), (2, 3)))
    assert [draw.at(i) for i in range(3)] == [(0, 1), (2, 3), (0, 1)]


def test_the_costliest_sets_cover_every_draw_in_a_model_of_memory() -> None:
    """Peaks by hand: an active block keeps A more from its forward to its backward, and G from its backward on."""
    count = 5
    for a, g in ((1, 7), (7, 1), (3, 3)):
        for kept in range(count + 1):
            recomputed = range(count - kept)
            for active in range(1, count + 1):
                for through in (True, False):
                    worst = max(_peak(s, count, recomputed, a, g, through) for s in combinations(range(count), active))
                    tried = costliest(count, active, through, recomputed)
                    assert all(len(s) == active for s in tried)
                    assert max(_peak(s, count, recomputed, a, g, through) for s in tried) == worst


def _peak(active: tuple[int, ...], count: int, recomputed: range, a: int, g: int, through: bool) -> int:
    full, entry = 10, 2
    lowest = 0 if through else min(active)

    def held(block: int) -> int:
        if block < lowest:
            return 0
        return entry if block in recomputed else full + a * (block in active)

    peaks = [sum(held(i) for i in range(count))]
    for block in reversed(range(lowest, count)):
        above = sum(g for i in active if i > block)
        own = full + a * (block in active) + (entry if block in recomputed else 0)
        peaks.append(sum(held(i) for i in range(block)) + own + above)
        peaks.append(sum(held(i) for i in range(block)) + above + g * (block in active))
    return max(peaks)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16, bias=False), nn.Linear(16, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu())


def test_planted_outliers_are_counted() -> None:
    """100 x planted / entries, over the entries of both layers together."""
    torch.manual_seed(0)
    weight, small = torch.full((16, 8), 0.1), torch.full((5, 16), 0.1)
    for i, j in ((0, 0), (7, 3), (15, 7)):
        weight[i, j] = 50.0
    found = percent_above([(weight, torch.ones(8)), (small, torch.ones(16))], threshold=13.0)
    assert found == pytest.approx(100 * 3 / (16 * 8 + 5 * 16))


def test_scores_do_not_depend_on_the_scale_of_all_weights_or_all_inputs() -> None:
    weights = [torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).pow(3), torch.randn(5, 16).pow(3)]
    norms = [torch.rand(8) + 0.1, torch.rand(16) + 0.1]
    plain = percent_above(list(zip(weights, norms, strict=True)), 4.0)
    assert plain > 0
    scaled = percent_above([(8 * w, n) for w, n in zip(weights, norms, strict=True)], 4.0)
    louder = percent_above([(w, 0.25 * n) for w, n in zip(weights, norms, strict=True)], 4.0)
    one_alone = percent_above([(64 * weights[0], norms[0]), (weights[1], norms[1])], 4.0)
    assert scaled == louder == plain != one_alone


def test_outlier_scores_are_those_of_the_inputs_that_were_seen() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(Pair(), nn.Linear(5, 8), Pair())
    batches = [torch.randn(3, 7, 8), torch.randn(2, 7, 8)]
    found = outlier_scores(model, ["0", "2"], model, batches, threshold=2.0)
    x = torch.cat([b.reshape(-1, 8) for b in batches])
    with torch.no_grad():
        hidden = model[0].one(x).relu()
        entries = torch.cat(
            [
                (model[0].one.weight.abs() * x.norm(dim=0)).flatten(),
                (model[0].two.weight.abs() * hidden.norm(dim=0)).flatten(),
            ]
        )
    assert found[0] == pytest.approx(100 * float((entries > 2.0 * entries.mean()).double().mean()))
    assert found[0] > 0
    assert not any(m._forward_pre_hooks for m in model.modules())
