"""The identities of each preset's paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skimp.optim.presets as presets
from skimp.optim import AdamW
from skimp.optim.bases import Identity, Subspace
from skimp.optim.fisher import Fisher
from skimp.optim.inner import Adam
from skimp.optim.online_pca import pca_gradient
from skimp.optim.posts import ScaleRaw, SignRest, limited
from skimp.optim.projected import Projected
from skimp.optim.rows import Rows
from skimp.optim.stages import Place, Stages

F64 = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def place(a: int, b: int, rank: int, step: int = 1, **group: Any) -> Place:
    return Place("w", step, rank, a, b, {"seed": 0, "scale": 1.0, "betas": (0.9, 0.999), "refresh": 10**9, **group})


class Free(Projected):
    """Any composition, by the test."""

    rule = "free"

    def __init__(self, params: Any, stages: Stages, **options: Any) -> None:
        super().__init__(params, stages, **presets.COMMON | {"scale": 1.0, "stagger": False} | options)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that save nothing are let through, for identities at full rank."""
    monkeypatch.setattr(Subspace, "saves", False)
    monkeypatch.setattr(Rows, "saves", False)


# ---- Online Subspace Descent


@pytest.mark.parametrize("ortho", [0.0, 0.3])
def test_pca_gradient_is_autograds(ortho: float) -> None:
    basis, g = numbers(9, 4).requires_grad_(), numbers(9, 21, seed=1)
    unit = g / g.norm()
    loss = (basis @ (basis.t() @ unit) - unit).square().sum()
    loss = loss + ortho * (basis.t() @ basis - torch.eye(4, dtype=F64)).square().sum()
    (expected,) = torch.autograd.grad(loss, basis)
    with torch.no_grad():
        found = pca_gradient(basis, g, basis.t() @ g, g.norm(), ortho)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_online_pca_finds_the_leading_space_and_stays_orthonormal() -> None:
    left, right = torch.linalg.qr(numbers(32, 32))[0], torch.linalg.qr(numbers(48, 32, seed=1))[0]
    matrix = (left * torch.exp(-torch.arange(32) / 4.0)) @ right.t()
    p = nn.Parameter(torch.zeros(32, 48, dtype=F64))
    rule = presets.OnlineSubspaceDescent([("w", p)], rank=6)
    rule.step_parameter(p, numbers(32, 48, seed=3))  # begins in the space of noise
    for step in range(900):
        rule.step_parameter(p, matrix + 1e-3 * numbers(32, 48, seed=step) / 40)
    basis = rule.state[p]["P"]
    span = torch.linalg.qr(basis)[0]
    assert float(torch.linalg.svdvals(left[:, :6].t() @ span).min()) > 0.99
    assert float((basis.t() @ basis - torch.eye(6, dtype=F64)).norm()) < 0.05


def test_a_basis_that_does_not_learn_is_galore_without_changes() -> None:
    one, two = (nn.Parameter(torch.zeros(12, 31)) for _ in range(2))
    rule = presets.OnlineSubspaceDescent([("w", one)], rank=3, pca_rate=0.0, ortho=0.0)
    other = presets.GaLore([("w", two)], rank=3, svd="random", refresh=10**9)
    for step in range(6):
        g = numbers(12, 31, seed=step).float()
        rule.step_parameter(one, g)
        other.step_parameter(two, g)
    assert torch.equal(one, two)


def test_the_lift_uses_the_basis_of_before_the_step_and_the_rate_follows_the_schedule() -> None:
    p = nn.Parameter(torch.zeros(12, 31, dtype=F64))
    rule = presets.OnlineSubspaceDescent([("w", p)], rank=3, lr=0.1, scale=1.0)
    rule.step_parameter(p, numbers(12, 31))
    basis, before = rule.state[p]["P"].clone(), p.detach().clone()
    rule.step_parameter(p, numbers(12, 31, seed=1))
    moved = p.detach() - before
    torch.testing.assert_close(basis @ torch.linalg.lstsq(basis, moved).solution, moved, rtol=0, atol=1e-12)
    assert not torch.equal(rule.state[p]["P"], basis)
    rule.param_groups[0]["lr"] = 0.0
    basis = rule.state[p]["P"].clone()
    rule.step_parameter(p, numbers(12, 31, seed=2))
    assert torch.equal(rule.state[p]["P"], basis)


# ---- Natural GaLore


def test_the_gram_of_a_ring_equals_the_gram_made_anew() -> None:
    fisher, at = Fisher(3, 1e-3), place(4, 9, 4)
    spec = fisher.spec((4, 9), F64)
    state: dict[str, Any] = {k: torch.zeros(s, dtype=d) for k, (s, d) in spec.items()} | {"filled": 0, "slot": 0}
    for step in range(8):
        r = numbers(4, 9, seed=step)
        found = fisher(r, state, at)
        rows = state["history"]
        torch.testing.assert_close(state["gram"], rows @ rows.t(), rtol=1e-13, atol=0)
        damping = 1e-3 * float(state["gram"].diagonal().sum()) / state["filled"]
        dense = torch.linalg.solve(damping * torch.eye(36, dtype=F64) + rows.t() @ rows, r.flatten())
        torch.testing.assert_close(found.flatten(), dense, rtol=1e-8, atol=1e-10)
    assert state["filled"] == 3
    fisher.reset(state)
    assert not bool(state["history"].any() or state["gram"].any())
    assert state["filled"] == state["slot"] == 0


def test_vectors_of_two_bases_are_never_mixed() -> None:
    p = nn.Parameter(torch.zeros(12, 31))
    rule = presets.NaturalGaLore([("w", p)], rank=3, refresh=4, history=6, stagger=False)
    for step in range(6):
        rule.step_parameter(p, numbers(12, 31, seed=step).float())
    assert rule.state[p]["refreshed"] == 5
    assert rule.state[p]["filled"] == 2
    assert int((rule.state[p]["history"].norm(dim=1) > 0).sum()) == 2


def test_strong_damping_is_galore(full: None) -> None:
    one, two = (nn.Parameter(torch.zeros(12, 31, dtype=F64)) for _ in range(2))
    rule = Free([("w", one)], Stages(Subspace(), Adam(), (Fisher(4, 1e9, absolute=True),)), rank=4, eps=1e-30)
    other = presets.GaLore([("w", two)], rank=4, scale=1.0, eps=1e-30)
    for step in range(5):
        g = numbers(12, 31, seed=step)
        rule.step_parameter(one, g)
        other.step_parameter(two, g)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


# ---- Grass and FRUGAL


@pytest.mark.parametrize("shape", [(12, 31), (31, 12)])
def test_all_rows_without_change_are_adam_bit_for_bit(full: None, shape: tuple[int, int]) -> None:
    one, two = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    rule = presets.Grass([("w", one)], rank=12, refresh=10**9, scale=1.0, lr=1e-2, weight_decay=0.1)
    other = AdamW([("w", two)], lr=1e-2, weight_decay=0.1)
    for step in range(7):
        g = numbers(*shape, seed=step).float()
        rule.step_parameter(one, g)
        other.step_parameter(two, g)
    assert torch.equal(one, two)


def test_a_new_selection_begins_adam_anew(full: None) -> None:
    one, two = (nn.Parameter(torch.ones(12, 31)) for _ in range(2))
    rule = presets.Frugal([("w", one)], rank=12, refresh=3, stagger=False, rest=1.0, lr=1e-2)
    other = AdamW([("w", two)], lr=1e-2, weight_decay=0.0)
    for step in range(9):
        if step % 3 == 0:
            other.state.clear()
        g = numbers(12, 31, seed=step).float()
        rule.step_parameter(one, g)
        other.step_parameter(two, g)
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def drawn(how: Any, replace: bool, g: Tensor, rank: int, step: int) -> dict[str, Tensor]:
    rows = Rows(how, replace)
    state = {k: torch.zeros(s, dtype=d) for k, (s, d) in rows.spec(*g.shape, rank, F64).items()}
    rows.refresh(g, state, place(*g.shape, rank, step))
    return state


@pytest.mark.parametrize("how", ["norm", "norm2", "uniform"])
def test_drawn_rows_are_without_bias_and_of_the_papers_variance(how: Any) -> None:
    """E[P·Pᵀ] = 1, and E‖P·Pᵀ·G − G‖² = (Σ‖Gᵢ‖²/qᵢ − ‖G‖²)/r."""
    g, rank, times = numbers(8, 20) * torch.linspace(0.5, 1.5, 8, dtype=F64).unsqueeze(1), 3, 3000
    squares = g.square().sum(1)
    q = {"norm": squares.sqrt(), "norm2": squares, "uniform": torch.ones(8, dtype=F64)}[how]
    q = q / q.sum()
    diagonal, error = torch.zeros(times, 8, dtype=F64), 0.0
    for step in range(times):
        state = drawn(how, True, g, rank, step)
        diagonal[step].index_add_(0, state["chosen"], state["rho"].double().square())
        error += float(((diagonal[step] - 1).square() * squares).sum()) / times
    deviation = diagonal.std(0) / times**0.5
    assert bool(((diagonal.mean(0) - 1).abs() < 4.5 * deviation).all())
    assert error == pytest.approx(float(((squares / q).sum() - squares.sum()) / rank), rel=0.1)


def test_top_rows_are_the_largest_and_rows_without_replacement_differ() -> None:
    g = numbers(9, 5)
    largest = g.norm(dim=1).topk(4).indices.sort().values
    assert torch.equal(drawn("top", False, g, 4, 1)["chosen"].long(), largest)
    for step in range(20):
        assert drawn("norm", False, g, 6, step)["chosen"].unique().numel() == 6


def test_rows_drawn_twice_move_twice_and_others_not_a_bit() -> None:
    p = nn.Parameter(numbers(12, 31).float())
    rule = presets.Grass(
        [("w", p)], rank=8, rows="norm", replace=True, decay_rest=False, weight_decay=0.1, lr=1e-2, seed=3
    )
    before, g = p.detach().clone(), numbers(12, 31, seed=1).float()
    rule.step_parameter(p, g)
    state = rule.state[p]
    dense = torch.zeros(12, 8, dtype=F64)
    for j, (i, rho) in enumerate(zip(state["chosen"].tolist(), state["rho"].tolist(), strict=True)):
        dense[i, j] = rho
    r = dense.t() @ g.double()
    touched = dense.abs().sum(1, keepdim=True) > 0
    moved = before.double() * torch.where(touched, 1 - 1e-3, 1.0) - 1e-2 * 0.25 * dense @ (r / (r.abs() + 1e-8))
    torch.testing.assert_close(p.detach().double(), moved, rtol=0, atol=1e-6)
    assert torch.equal(p[~touched.squeeze(1)], before[~touched.squeeze(1)])
    assert state["chosen"].unique().numel() < 8


def test_uniform_rows_cover_all_in_a_logarithm_of_periods() -> None:
    seen: set[int] = set()
    for period in range(40):
        seen |= set(drawn("uniform", False, torch.ones(32, 3, dtype=F64), 8, period)["chosen"].tolist())
        if len(seen) == 32:
            break
    assert period < 2 * 4 * 3.47  # 2 · m/r · log m


def test_frugal_moves_the_rest_by_its_sign() -> None:
    p = nn.Parameter(torch.zeros(12, 31, dtype=F64))
    rule, g = presets.Frugal([("w", p)], rank=4, lr=0.1, rest=0.5), numbers(12, 31)
    rule.step_parameter(p, g)
    rows = rule.state[p]["chosen"].long()
    expected = 0.5 * g.sign()
    expected[rows] = g[rows] / (g[rows].abs() + 1e-8)
    torch.testing.assert_close(p.detach(), -0.1 * expected, rtol=0, atol=1e-12)
    assert SignRest().spec(3, 4) == {}


def test_the_scale_is_a_factor_of_frugals_moves() -> None:
    one, two = (nn.Parameter(torch.zeros(12, 31, dtype=F64)) for _ in range(2))
    for p, scale in ((one, 1.0), (two, 0.5)):
        presets.Frugal([("w", p)], rank=4, lr=0.1, scale=scale).step_parameter(p, numbers(12, 31))
    torch.testing.assert_close(two, 0.5 * one.detach(), rtol=1e-12, atol=0)


# ---- APOLLO and Fira


def test_channels_are_as_long_as_adam_made_them() -> None:
    """With the identity for a projection ‖Dⱼ‖ = ‖ψⱼ‖; the tensor form is parallel to G."""
    g, psi = numbers(12, 31), numbers(12, 31, seed=1)
    state = {"norm": torch.zeros(())}
    found = ScaleRaw("channel").delta(g, g, psi, Identity(), state, place(12, 31, 12))
    torch.testing.assert_close(found.norm(dim=0), psi.norm(dim=0), rtol=1e-6, atol=0)
    state = {"norm": torch.zeros(())}
    mini = ScaleRaw("tensor").delta(g, g[:1], psi[:1], Identity(), state, place(12, 31, 1, scale=128.0))
    torch.testing.assert_close(mini / g, (mini / g)[0, 0].expand(12, 31))
    assert float((mini / g)[0, 0]) == pytest.approx(128**0.5 * float(psi[:1].norm() / g[:1].norm()), rel=1e-6)


def test_the_limit_of_growth() -> None:
    state = {"norm": torch.zeros(())}
    last = 0.0
    for size in (1.0, 5.0, 0.0, 0.3, 0.9, 0.1):
        direction = numbers(5, 7)
        direction = limited(direction * (size / direction.norm()), state, 1.01)
        norm = float(direction.norm())
        if last:
            assert norm <= 1.01 * (last + 1e-8) * (1 + 1e-6)
        if size < last:
            assert norm == pytest.approx(size, rel=1e-6)  # shrinking is free
        last = norm or last  # a direction of zeros is not remembered
        assert float(state["norm"]) == pytest.approx(last, rel=1e-6)


def test_a_drawn_projection_is_the_same_in_its_period_and_after_a_resume() -> None:
    p = nn.Parameter(torch.zeros(12, 31))
    rule = presets.Apollo([("w", p)], rank=4, refresh=5, stagger=False)
    where = place(12, 31, 4)
    basis = rule.stages.projector
    drawn_at = [basis.drawn({"refreshed": t}, where, p) for t in (1, 1, 6)]  # type: ignore[attr-defined]
    assert torch.equal(drawn_at[0], drawn_at[1])
    assert not torch.equal(drawn_at[0], drawn_at[2])
    many = basis.drawn({"refreshed": 1}, place(400, 3, 50), p)  # type: ignore[attr-defined]
    assert float(many.square().sum(1).mean()) == pytest.approx(1.0, rel=0.05)


def test_fira_at_full_rank_has_no_residual(full: None) -> None:
    one, two = (nn.Parameter(torch.zeros(12, 31, dtype=F64)) for _ in range(2))
    rule = presets.Fira([("w", one)], rank=12, scale=1.0)
    other = presets.GaLore([("w", two)], rank=12, scale=1.0)
    for step in range(5):
        g = numbers(12, 31, seed=step)
        rule.step_parameter(one, g)
        other.step_parameter(two, g)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize("released", [False, True])
def test_fira_by_hand(released: bool) -> None:
    p = nn.Parameter(torch.zeros(12, 31, dtype=F64))
    rule, g = presets.Fira([("w", p)], rank=4, lr=0.1, scale=0.25, as_released=released), numbers(12, 31)
    rule.step_parameter(p, g)
    basis = rule.state[p]["P"]
    r = basis.t() @ g
    psi = r / (r.abs() + 1e-8)
    rest = (g - (0.25 if released else 1.0) * basis @ r) * (psi.norm(dim=0) / (r.norm(dim=0) + 1e-8))
    torch.testing.assert_close(p.detach(), -0.1 * (0.25 * basis @ psi + rest), rtol=0, atol=1e-12)


# ---- Q-GaLore and LDAdam


def test_the_period_doubles_at_the_sixth_like_basis() -> None:
    p = nn.Parameter(torch.zeros(12, 31))
    rule = presets.QGaLore([("w", p)], rank=2, refresh=2, stagger=False, svd="exact")
    g = (numbers(12, 1) @ numbers(1, 31, seed=1) + 0.01 * numbers(12, 31, seed=2)).float()
    gaps = []
    for _ in range(17):
        rule.step_parameter(p, g)
        gaps.append((rule.state[p]["seen"], rule.state[p]["gap"]))
    assert gaps[0] == (0, 2)
    assert [gap for seen, gap in gaps if seen < 5] == [2] * sum(seen < 5 for seen, _ in gaps)
    assert gaps[10] == (5, 4)
    rule = presets.QGaLore([("w", p)], rank=2, refresh=2, stagger=False, svd="exact")
    for step in range(17):
        rule.step_parameter(p, numbers(12, 31, seed=step).float() * (1 if step % 4 else 100))
    assert rule.state[p]["seen"] == 8


def test_nothing_is_lost_of_the_gradients_of_ldadam() -> None:
    """Σ Gₜ = Σ Pₜ·Rₜ + carried momentum + the error held: the sum telescopes, whatever the rank."""
    p = nn.Parameter(torch.zeros(12, 31, dtype=F64))
    rule = presets.LDAdam([("w", p)], rank=3)
    beta1 = 0.908
    given, moved = torch.zeros(12, 31, dtype=F64), torch.zeros(12, 31, dtype=F64)
    for step in range(12):
        g = numbers(12, 31, seed=step)
        rule.step_parameter(p, g)
        given += g
        state = rule.state[p]
        moved += state["P"] @ state["m"]
    left = beta1 / (1 - beta1) * state["P"] @ state["m"] + state["error"]
    torch.testing.assert_close(moved + left, given, rtol=0, atol=1e-10)


def test_ldadam_at_full_rank_has_no_error(full: None) -> None:
    p = nn.Parameter(torch.zeros(12, 31, dtype=F64))
    rule = presets.LDAdam([("w", p)], rank=12)
    for step in range(4):
        rule.step_parameter(p, numbers(12, 31, seed=step))
        assert float(rule.state[p]["error"].abs().max()) < 1e-12


def test_every_paper_is_named() -> None:
    from skimp.optim.family_facts import FAMILY

    assert all(f.paper is not None and f.paper.arxiv for f in FAMILY)
    assert {f.name for f in FAMILY} == {
        c.rule
        for c in vars(presets).values()
        if isinstance(c, type) and issubclass(c, Projected) and c is not Projected
    } | {"compact"}
