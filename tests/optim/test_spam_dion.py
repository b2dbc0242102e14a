"""SPAM, Stable-SPAM and Dion: the identities their papers promise, schedules, sparse moments, dead directions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skimp.core.cholesky_qr import orthonormal_columns
from skimp.core.errors import SkimpError
from skimp.core.memory.oracle import witness
from skimp.core.workspace import workspace_bytes
from skimp.optim import SPAM, Dion, StableSPAM
from skimp.optim.restarts import cosine_decay, restart_at
from skimp.optim.spam_sparse import Places

HIDDEN: dict[str, Any] = {"role": "up", "columns": False, "head_dim": 0}
NEVER = {"every": 0, "warmup": 0}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spam(p: Tensor, grads: list[Tensor], lr: float = 1e-2, wd: float = 0.1, theta: float = math.inf) -> Tensor:
    """Without resets: eps beside the uncorrected root, decay after."""
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        limit = (theta * v).sqrt()
        g = torch.where((g.abs() > limit) & (v > 0) & (t >= 20), g.sign() * limit, g) if theta < math.inf else g
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - lr * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-6)
        p = p - lr * wd * p
    return p


# ------------------------------------------------------------------------------------------------ SPAM
def test_without_clip_and_reset_it_is_the_plain_rule() -> None:
    p = nn.Parameter(random(37, 11))
    rule = SPAM([("w", p)], lr=1e-2, weight_decay=0.1, theta=math.inf, **NEVER)
    grads = [random(37, 11, seed=i + 1) for i in range(30)]
    for g in grads:
        rule.step_parameter(p, g)
    torch.testing.assert_close(p.detach(), spam(random(37, 11), grads), rtol=1e-12, atol=1e-13)


def spiked(theta: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(v before, v after, m before, m after) of a step with a spike of 1,000 in place 3, after 100 ordinary steps."""
    p = nn.Parameter(random(50))
    rule = SPAM([("w", p)], theta=theta, **NEVER)
    for i in range(100):
        rule.step_parameter(p, random(50, seed=i + 1))
    state = rule.state[p]
    before = state["v"].clone(), state["m"].clone()
    g = random(50, seed=999)
    g[3] = 1000.0
    rule.step_parameter(p, g)
    return before[0], state["v"].clone(), before[1], state["m"].clone()


def test_a_spike_multiplies_the_second_moment_by_six_at_most() -> None:
    v0, v1, m0, m1 = spiked(5000.0)
    assert v1[3] <= (0.999 + 0.001 * 5000) * v0[3] * (1 + 1e-12)
    assert abs(m1[3]) <= 0.9 * abs(m0[3]) + 0.1 * math.sqrt(5000 * v0[3]) * (1 + 1e-12)
    plain = spiked(math.inf)
    assert plain[1][3] > 1000 * plain[0][3]
    others = torch.arange(50) != 3
    assert torch.equal(v1[others], plain[1][others])
    assert torch.equal(m1[others], plain[3][others])


def test_a_clipped_gradient_keeps_its_sign_and_meets_the_limit() -> None:
    for sign in (1.0, -1.0):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        rule = SPAM([("w", p)], theta=100.0, betas=(0.0, 0.9), after=2, **NEVER)
        rule.step_parameter(p, torch.ones(1, dtype=torch.float64))
        before = float(rule.state[p]["v"])
        rule.step_parameter(p, torch.full((1,), sign * 50.0, dtype=torch.float64))
        found = float(rule.state[p]["m"])  # β₁ = 0: the gradient itself
        assert found == pytest.approx(sign * math.sqrt(100.0 * before), rel=1e-15)


def test_where_the_second_moment_is_zero_nothing_is_clipped() -> None:
    """The released rule clips to 0 there, and the row of a token first met now would not learn."""
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    rule = SPAM([("w", p)], after=2, **NEVER)
    for _ in range(5):
        rule.step_parameter(p, torch.tensor([1.0, 0.0], dtype=torch.float64))
    rule.step_parameter(p, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert float(rule.state[p]["v"][1]) > 0
    assert float(p.detach()[1]) < 0


def test_the_scale_after_a_reset() -> None:
    scales = [restart_at(500 + i, 500, 150).scale for i in range(152)]
    assert scales[:3] == pytest.approx([0.01, 0.01011, 0.01043], abs=5e-6)
    assert scales[75] == pytest.approx(0.4999, abs=5e-5)
    assert scales[150:] == [1.0, 1.0]
    assert restart_at(499, 500, 150).scale == 1.0
    assert cosine_decay(0, 150) == 0.99


def test_a_reset_begins_the_count_anew_and_the_first_move_is_the_rate() -> None:
    p = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    rule = SPAM([("w", p)], lr=1e-2, every=7, warmup=0, eps=1e-12)
    for _ in range(6):
        rule.step_parameter(p, torch.ones(4, dtype=torch.float64))
    before = p.detach().clone()
    rule.step_parameter(p, torch.full((4,), 5.0, dtype=torch.float64))
    torch.testing.assert_close(before - p.detach(), torch.full((4,), 1e-2, dtype=torch.float64), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(rule.state[p]["m"], torch.full((4,), 0.5, dtype=torch.float64))


def test_a_count_that_runs_on_makes_the_moves_after_a_reset_up_to_six_times_too_large() -> None:
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    rule = SPAM([("w", p)], lr=1.0, every=5000, warmup=0, keep_count=True, theta=0.0)
    p_state = rule.init_state(p)
    p_state["step"] = 4999
    moves = []
    for _ in range(20):
        before = float(p.detach())
        rule.step_parameter(p, torch.ones(1, dtype=torch.float64))
        moves.append(before - float(p.detach()))
    assert moves[0] == pytest.approx(3.16, abs=0.02)
    assert max(moves) == pytest.approx(6.57, abs=0.03)
    assert moves.index(max(moves)) == 11


def test_sparse_moments_move_one_number_of_each_run_and_no_other() -> None:
    p = nn.Parameter(random(64, 64, dtype=torch.float32))
    rule = SPAM([{"params": [("w", p)], **HIDDEN}], density=0.25, every=3, warmup=0, weight_decay=0.1)
    met = torch.zeros(64, 64, dtype=torch.bool)
    last = p.detach().clone()
    for step in range(1, 3 * 40):
        rule.step_parameter(p, random(64, 64, seed=step, dtype=torch.float32))
        moved = p.detach() != last
        assert moved.view(-1, 4).sum(1).max() == 1  # one of every four
        assert 1020 <= int(moved.sum()) <= 1024  # a move below the weight.s own step shows nothing
        met |= moved
        last = p.detach().clone()
    assert met.all()  # 39 draws of a quarter: one of 4,096 is missed in 1 of 18 seeds
    state = rule.state[p]
    assert state["m"].shape == state["v"].shape == (1024,)
    assert rule.bytes_of(p) == 2 * 4 * 1024


@pytest.mark.parametrize("total", [4096, 4099, 70_001])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.999])
def test_places_lie_each_in_its_run_and_are_uniform(total: int, density: float) -> None:
    runs = int(density * total)
    found = Places(runs, torch.device("cpu")).draw(7, 1, 0, runs, runs, total)
    low = torch.arange(runs) * total // runs
    high = (torch.arange(runs) + 1) * total // runs
    assert ((found >= low) & (found < high)).all()
    share = (found - low).double() / (high - low)
    expected = ((high - low - 1).double() / (high - low) / 2).mean()
    assert abs(float(share.mean() - expected)) < 4 * 0.3 / math.sqrt(runs)


def test_a_sparse_run_goes_on_in_the_middle_of_a_period_to_the_bit() -> None:
    def run(p: nn.Parameter, rule: SPAM, first: int, last: int) -> None:
        for step in range(first, last):
            rule.step_parameter(p, random(64, 64, seed=step, dtype=torch.bfloat16))

    def make() -> tuple[nn.Parameter, SPAM]:
        p = nn.Parameter(random(64, 64, dtype=torch.bfloat16))
        return p, SPAM([{"params": [("w", p)], **HIDDEN}], density=0.25, every=5, warmup=2)

    p, rule = make()
    run(p, rule, 0, 14)
    q, first = make()
    run(q, first, 0, 7)
    r, second = make()
    r.data.copy_(q.data)
    second.load_state_dict(first.state_dict())
    run(r, second, 7, 14)
    assert torch.equal(p, r)


def test_density_needs_roles_and_the_rest_stays_dense() -> None:
    p, table = (nn.Parameter(random(64, 64, dtype=torch.float32)) for _ in range(2))
    with pytest.raises(SkimpError, match="a group without a role"):
        SPAM([("w", p)], density=0.5)
    groups = [{"params": [("w", p)], **HIDDEN}, {"params": [("e", table)], **HIDDEN, "role": "embedding"}]
    rule = SPAM(groups, density=0.5)
    assert [row.state_bytes for row in rule.table()] == [4 * 4096, 8 * 4096]
    with pytest.raises(SkimpError, match="density"):
        SPAM([("w", p)], density=0.0)
    with pytest.raises(SkimpError, match="warmup"):
        SPAM([("w", p)], every=100, warmup=100)


# ------------------------------------------------------------------------------------------------ Stable-SPAM
def stable(p: Tensor, grads: list[Tensor], every: int) -> Tensor:
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    top = mean = power = 0.0
    k = 0
    for t, g in enumerate(grads, 1):
        largest = float(g.abs().max())
        top = 0.999 * top + 0.001 * largest
        limit = top / (1 - 0.999**t)
        g = torch.where(g.abs() > limit, g / largest * limit, g)
        norm = float(g.norm())
        mean, power = 0.7 * mean + 0.3 * norm, 0.9 * power + 0.1 * norm**2
        g = g / norm * (mean / (1 - 0.7**t)) / (math.sqrt(power / (1 - 0.9**t)) + 1e-8)
        if t % every == 0:
            m, v, k = torch.zeros_like(p), torch.zeros_like(p), 0
        k += 1
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * (m / (1 - 0.9**k)) / ((v / (1 - 0.999**k)).sqrt() + 1e-8)
    return p


@pytest.mark.parametrize("shape", [(301, 257), (70_001,), (3, 7)])
def test_stable_spam_is_its_definition_in_float64(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(random(*shape))
    rule = StableSPAM([("w", p)], lr=1e-2, weight_decay=0.1, every=4)
    grads = [random(*shape, seed=i + 1) * (10 if i == 5 else 1) for i in range(7)]
    for g in grads:
        rule.step_parameter(p, g)
    torch.testing.assert_close(p.detach(), stable(random(*shape), grads, 4), rtol=1e-11, atol=1e-12)


def test_stable_spam_of_a_gradient_of_zeros_is_finite_whatever_the_history() -> None:
    """A norm that fades faster than its square: their ratio over the smallest number is beyond float32."""
    p = nn.Parameter(random(5, 7, dtype=torch.float32))
    rule = StableSPAM([("w", p)], gammas=(0.7, 0.99999, 0.0))
    for step in range(1000):
        rule.step_parameter(p, random(5, 7, seed=step, dtype=torch.float32) * (1e-3 if step < 997 else 1.0))
    rule.step_parameter(p, torch.zeros(5, 7))
    assert p.isfinite().all()


# ------------------------------------------------------------------------------------------------ Dion
def dion(p: nn.Parameter, **options: Any) -> Dion:
    return Dion([{"params": [("w", p)], **HIDDEN}], **{"lr": 1e-2, "weight_decay": 0.0, **options})


def test_an_update_has_orthonormal_p_unit_columns_of_q_and_norm_root_r() -> None:
    p = nn.Parameter(random(40, 60))
    rule = dion(p, rank=0.25, lr=1.0)
    for step in range(3):
        before = p.detach().clone()
        rule.step_parameter(p, random(40, 60, seed=step + 1))
    move = (before - p.detach()) / math.sqrt(40 / 60)
    assert float(move.norm()) == pytest.approx(math.sqrt(10), rel=1e-9)
    assert torch.linalg.matrix_rank(move) == 10
    torch.testing.assert_close(rule.state[p]["q"].norm(dim=0), torch.ones(10, dtype=torch.float64))
    assert float(torch.linalg.matrix_norm(move, 2)) <= math.sqrt(10)


def test_error_feedback_takes_away_what_was_applied() -> None:
    p = nn.Parameter(random(20, 30))
    rule = dion(p, rank=0.2, momentum=0.9)
    g, q = random(20, 30, seed=5), None
    q = rule.init_state(p)["q"].clone()
    rule.step_parameter(p, g)
    basis = torch.linalg.qr(g @ q).Q
    expected = g - 0.1 * basis @ (g.mT @ basis).mT
    torch.testing.assert_close(rule.state[p]["m"], expected, rtol=1e-9, atol=1e-9)


def test_at_full_rank_without_memory_the_momentum_is_emptied_and_the_polar_factor_is_found() -> None:
    p = nn.Parameter(random(10, 14))
    rule = dion(p, rank=1.0, momentum=0.0, lr=1.0)
    g = random(10, 14, seed=3)
    for _ in range(200):
        before = p.detach().clone()
        rule.step_parameter(p, g)
        assert float(rule.state[p]["m"].abs().max()) < 1e-9
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    torch.testing.assert_close((before - p.detach()) / math.sqrt(10 / 14), u @ vt, rtol=0.0, atol=1e-3)


def test_dead_directions_move_nothing() -> None:
    p = nn.Parameter(random(12, 16, dtype=torch.float32))
    rule = dion(p, rank=1.0)
    before = p.detach().clone()
    rule.step_parameter(p, torch.zeros(12, 16))
    assert torch.equal(p, before)
    assert rule.state[p]["q"].isfinite().all()
    rule.step_parameter(p, random(12, 1, dtype=torch.float32) @ random(1, 16, dtype=torch.float32))
    assert torch.linalg.matrix_rank(before - p.detach(), rtol=1e-4) == 1


def test_q_is_a_function_of_seed_and_name() -> None:
    states = [dion(nn.Parameter(random(8, 9)), seed=s) for s in (0, 0, 1)]
    qs = [rule.init_state(rule.parameters()[0])["q"] for rule in states]
    assert torch.equal(qs[0], qs[1])
    assert not torch.equal(qs[0], qs[2])
    assert qs[0].shape == (9, 2)


def test_orthonormal_columns_of_ill_conditioned_and_dead_ones() -> None:
    y = random(50, 10)
    y[:, 3] = 0.0
    y[:, 7] = y[:, 2] + 1e-9 * random(50, seed=2)
    q = orthonormal_columns(y)
    expected = torch.eye(10, dtype=torch.float64)
    expected[3, 3] = 0.0
    torch.testing.assert_close(q.mT @ q, expected, rtol=0.0, atol=1e-10)
    torch.testing.assert_close(q @ (q.mT @ y), y, rtol=1e-9, atol=1e-9)
    assert torch.equal(orthonormal_columns(torch.zeros(5, 3).double()), torch.zeros(5, 3).double())


# ------------------------------------------------------------------------------------------------ all
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(301, 257), (48, 104), (600, 64)])
def test_workspace_is_what_is_allocated(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for cls, options, name in (
            (SPAM, {}, "spam"),
            (SPAM, {"density": 0.25}, "spam_sparse"),
            (StableSPAM, {}, "stable_spam"),
            (Dion, {}, "dion"),
        ):
            p, grad = nn.Parameter(random(*shape, dtype=dtype)), random(*shape, seed=1, dtype=dtype)
            rule = cls([{"params": [("w", p)], **HIDDEN}], **options)
            state = rule.init_state(p)
            held = (p, grad, state["m"], state["q"]) if cls is Dion else (p, grad, [state["m"], state["v"]])
            found = witness(lambda rule=rule, p=p, grad=grad: rule.step_parameter(p, grad))[1]
            assert found.peak == workspace_bytes(f"skimp::{name}", held), name
    finally:
        torch.set_num_threads(before)
