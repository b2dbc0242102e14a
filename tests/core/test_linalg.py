"""Leading subspaces and the Fisher solve, held against dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from skimp.core.linalg import (
    exact_basis,
    fisher_solve,
    fix_signs,
    orthonormal,
    random_basis,
    random_signs,
    warm_basis,
)

WHERE = {"seed": 3, "name": "w", "stream": 7}


def captured(matrix: Tensor, basis: Tensor) -> Tensor:
    """The part of ‖matrix‖² that lies in the span of orthonormal columns."""
    return torch.mm(basis.t(), matrix).square().sum() / matrix.square().sum()


def decaying(a: int, b: int, length: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """(a, b) with singular values exp(−i / length)."""
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(a, a, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(b, a, generator=generator, dtype=torch.float64))[0]
    return ((left * torch.exp(-torch.arange(a) / length)) @ right.t()).to(dtype)


def flat(a: int, b: int) -> Tensor:
    return torch.randn(a, b, generator=torch.Generator().manual_seed(2))


def top(matrix: Tensor, rank: int) -> Tensor:
    return torch.linalg.svd(matrix.double(), full_matrices=False)[0][:, :rank].to(matrix.dtype)


def off(basis: Tensor) -> float:
    return float((basis.t() @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)).abs().max())


@pytest.mark.parametrize("shape", [(24, 70), (33, 33), (17, 1500)])
def test_exact_basis_is_the_svds_in_order_with_fixed_signs(shape: tuple[int, int]) -> None:
    matrix = decaying(*shape, 4.0)
    basis, expected = exact_basis(matrix, 9), fix_signs(top(matrix, 9))
    torch.testing.assert_close(basis, expected, rtol=0, atol=2e-5)
    assert off(basis) < 1e-5
    assert torch.equal(basis, exact_basis(matrix.clone(), 9))


def test_random_basis_of_a_decaying_spectrum() -> None:
    matrix, rank = decaying(200, 520, 10.0), 64
    best = top(matrix, rank)
    basis = random_basis(matrix, rank, oversample=8, power=1, **WHERE)
    assert float(torch.linalg.svdvals(best.t() @ basis).min()) > 0.99
    assert float(captured(matrix, basis) / captured(matrix, best)) > 1 - 1e-5
    assert off(basis) < 1e-5


def test_random_basis_of_a_flat_spectrum_captures_more_with_every_iteration() -> None:
    matrix, rank = flat(256, 704), 32
    best = captured(matrix, top(matrix, rank))
    parts = [
        float(captured(matrix, random_basis(matrix, rank, oversample=8, power=q, **WHERE)) / best) for q in range(4)
    ]
    assert parts == sorted(parts)
    assert parts[2] >= 0.88


def test_warm_basis_follows_the_subspace_and_keeps_signs() -> None:
    matrix = decaying(60, 130, 5.0)
    start = exact_basis(matrix, 12)
    moved = matrix + 0.01 * flat(60, 130) / 60**0.5
    basis = warm_basis(moved, start, power=1, **WHERE)
    assert float(captured(moved, basis) / captured(moved, top(moved, 12))) > 0.999
    assert bool(((basis * start).sum(0) > 0).all())


@pytest.mark.parametrize(
    "make", [lambda m: exact_basis(m, 8), lambda m: random_basis(m, 8, oversample=4, power=1, **WHERE)]
)
def test_a_basis_of_zero_or_low_rank_is_finite_and_complete_on_what_there_is(make: object) -> None:
    assert bool(make(torch.zeros(40, 70)).isfinite().all())  # type: ignore[operator]
    low = flat(40, 3) @ flat(3, 70)
    basis = make(low)  # type: ignore[operator]
    torch.testing.assert_close(basis @ (basis.t() @ low), low, rtol=0, atol=1e-4)


def test_a_lost_direction_comes_back() -> None:
    low = flat(40, 3) @ flat(3, 70)
    start = random_basis(low, 8, oversample=4, power=1, **WHERE)
    assert int((start.norm(dim=0) == 0).sum()) == 5
    assert off(warm_basis(flat(40, 70), start, power=1, **WHERE)) < 1e-5


def test_orthonormal_of_a_badly_conditioned_sketch() -> None:
    tall = decaying(20, 90, 2.5).t().contiguous()  # singular values down to 5e-4
    assert off(orthonormal(tall)) < 1e-5


def test_signs_are_addressed_and_even() -> None:
    one = random_signs(37, 53, 1, "a", 2, torch.zeros(()))
    assert set(one.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(one.mean())) < 0.1
    assert torch.equal(one, random_signs(37, 53, 1, "a", 2, torch.zeros(())))
    assert not torch.equal(one, random_signs(37, 53, 1, "a", 3, torch.zeros(())))


def history(s: int, k: int, filled: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows = torch.randn(s, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[filled:] = 0
    rows = rows.to(dtype)
    return rows, rows.double() @ rows.double().t()


@pytest.mark.parametrize("filled", [1, 3, 6])
def test_fisher_solve_equals_the_dense_inverse(filled: int) -> None:
    rows, gram = history(6, 50, filled, torch.float64)
    dense = torch.linalg.solve(0.3 * torch.eye(50).double() + rows.t() @ rows, rows[filled - 1])
    found = fisher_solve(rows, gram, filled - 1, 0.3)
    torch.testing.assert_close(found, dense, rtol=0, atol=1e-8)


def test_fisher_solve_of_one_gradient_is_a_scalar() -> None:
    rows, gram = history(1, 40, 1, torch.float64)
    torch.testing.assert_close(fisher_solve(rows, gram, 0, 1e-2), rows[0] / (1e-2 + rows[0].square().sum()))


def test_fisher_solve_keeps_the_digits_that_woodburys_difference_loses() -> None:
    """k = 50, s = 6, λ = 1e-3 in float32: error below 1e-6 where the difference of two near-equal vectors has 1e-3."""
    ours, naive = [], []
    for seed in range(40):
        rows, gram = history(6, 50, 6, torch.float32, seed)
        wide = rows.double()
        exact = torch.linalg.solve(1e-3 * torch.eye(50).double() + wide.t() @ wide, wide[2])
        small = torch.eye(6) + rows @ rows.t() / 1e-3
        z = torch.linalg.solve(small, rows @ rows[2])
        woodbury = rows[2] / 1e-3 - rows.t() @ z / 1e-6
        ours.append(float((fisher_solve(rows, gram, 2, 1e-3) - exact).norm() / exact.norm()))
        naive.append(float((woodbury - exact).norm() / exact.norm()))
    assert max(ours) < 1e-6
    assert max(naive) > 1e-3
