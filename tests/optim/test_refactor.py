"""Weight refactorization and momentum reset: the weight stays, factors are balanced, no direction dies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from skimp.core.errors import SkimpError
from skimp.core.events import Events, every
from skimp.optim import AdamW, AdamW8bit, Dion, refactor_, reset_moments, restart_


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_the_product_stays_and_the_factors_are_balanced() -> None:
    up, down = random(40, 6) * 100, random(6, 30, seed=1) / 100
    before = up @ down
    assert refactor_(up, down)
    assert (up @ down - before).norm() < 1e-6 * before.norm()
    left, right = up.mT @ up, down @ down.mT
    scale = float(left.max())
    torch.testing.assert_close(left, right, rtol=0.0, atol=1e-5 * scale)
    assert (left - left.diag().diag()).abs().max() < 1e-5 * scale
    s = torch.linalg.svdvals(before.double())[:6]
    torch.testing.assert_close(left.diag().double(), s, rtol=1e-5, atol=0.0)


def test_it_is_the_full_svd_s_answer_and_its_own_fixed_point() -> None:
    up, down = random(25, 4, dtype=torch.float64), random(4, 33, seed=1, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(up @ down, full_matrices=False)
    refactor_(up, down)
    expected_up, expected_down = u[:, :4] * s[:4].sqrt(), s[:4].sqrt()[:, None] * vt[:4]
    signs = (up * expected_up).sum(0).sign()
    torch.testing.assert_close(up, expected_up * signs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(down, expected_down * signs[:, None], rtol=1e-9, atol=1e-10)
    again = up.clone(), down.clone()
    refactor_(up, down)
    torch.testing.assert_close(up, again[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(down, again[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("case", ["zero up", "rank deficient", "not finite", "rank above a side"])
def test_a_pair_with_a_dead_direction_is_left_alone(case: str) -> None:
    up, down = random(20, 5), random(5, 30, seed=1)
    if case == "zero up":
        up.zero_()
    elif case == "rank deficient":
        up[:, 4] = up[:, 3]
    elif case == "not finite":
        up[0, 0] = float("nan")
    else:
        up, down = random(3, 5), random(5, 30, seed=1)
    before = up.clone(), down.clone()
    assert not refactor_(up, down)
    assert torch.equal(up.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(down, before[1])


def test_shapes_that_do_not_multiply_are_refused() -> None:
    with pytest.raises(SkimpError, match=r"\(20, 5\) and \(4, 30\)"):
        refactor_(random(20, 5), random(4, 30))


def trained(factor: float, restart: int | None) -> float:
    """400 steps of Adam on the mean of (B·A − W)² with W of rank 6, B scaled by `factor` and A by its inverse."""
    target = random(24, 6, seed=8) @ random(6, 30, seed=9) / 6**0.5
    b, a = nn.Parameter(random(24, 6) * 0.3 * factor), nn.Parameter(random(6, 30, seed=1) * 0.3 / factor)
    rule = AdamW([("b", b), ("a", a)], lr=1e-2, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(400):
        if step == restart:
            assert restart_([(b, a)], rule) == (1, 0)
        loss = (b @ a - target).square().mean()
        loss.backward()
        rule.step()
        rule.zero_grad()
    return float(loss.detach())


def test_an_unbalanced_pair_stalls_until_it_is_refactored() -> None:
    """B a hundred times too large and A as much too small: steps of lr are nothing to B and far too much for A."""
    assert trained(100.0, None) > 0.1
    assert trained(100.0, 0) < 1e-10
    assert trained(1.0, None) < 1e-10


def test_a_reset_makes_the_next_step_adam_s_first() -> None:
    p = nn.Parameter(random(80, 64))
    for cls in (AdamW, AdamW8bit):
        rule = cls([("w", p)], lr=1e-2, weight_decay=0.0)
        for step in range(5):
            rule.step_parameter(p, random(80, 64, seed=step))
        assert reset_moments(rule) == 1
        before = p.detach().clone()
        rule.step_parameter(p, random(80, 64, seed=77))
        assert rule.state[p]["step"] == 1
        assert (before - p.detach()).norm() <= 1e-2 * 80**0.5 * 64**0.5 * 1.01


def test_what_is_no_moment_outlives_a_reset() -> None:
    p = nn.Parameter(random(20, 30))
    rule = Dion([{"params": [("w", p)], "role": "up", "columns": False, "head_dim": 0}])
    rule.step_parameter(p, random(20, 30, seed=1))
    q = rule.state[p]["q"].clone()
    reset_moments(rule, [p])
    assert torch.equal(rule.state[p]["q"], q)
    assert not rule.state[p]["m"].any()


def test_it_is_an_action_of_an_event() -> None:
    up, down = nn.Parameter(random(20, 5)), nn.Parameter(random(5, 30, seed=1))
    rule = AdamW([("b", up), ("a", down)])
    found: list[tuple[int, int]] = []
    events = Events(
        every(3, lambda firing: found.append(restart_([(up, down)], rule)), name="restart", moments="reset")
    )
    for step in range(7):
        events.run(step)
    assert found == [(1, 0), (1, 0)]
