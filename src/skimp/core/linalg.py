"""Leading subspaces of a matrix, with bounded scratch, fixed signs and nothing random that is not addressed.

Everything is made of products and of symmetric eigenproblems in float64 on Gram matrices of the *short* side: an
(l, l) Gram of a float32 sketch keeps all of its digits in float64 (squares of 24 bits fit in 53), LAPACK's workspace
for it is a formula, and there is no dense SVD whose scratch is three times the matrix. Columns come in the order of
their singular values, so an element-wise rule in the basis sees the same coordinates on every machine.

Sources: Halko, Martinsson and Tropp, "Finding Structure with Randomness", 2011, algorithms 4.4 and 5.1; Woodbury,
"Inverting modified matrices", 1950.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core.noise import random_uint32
from skimp.core.repeat import rounds

#: Columns of the long side that an exact basis widens to float64 at a time.
PANEL = 1024


def fix_signs(basis: Tensor) -> Tensor:
    """(a, r) with every column turned so that its largest entry in size is positive: one basis per subspace order."""
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0).to(basis.dtype)


def whiten(gram: Tensor, rank: int) -> Tensor:
    """(l, rank) float64 W with Wᵀ·gram·W = 1 for the leading eigenvectors in order; zero where the rank ends earlier.

    Args:
        gram: (l, l) float64, symmetric and positive.
    """
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    # Below this an eigenvalue is the rounding of the float32 numbers the Gram was made of.
    floor = values[:1].clamp_min(1e-300) * (gram.shape[0] * 1e-13)
    return vectors * torch.where(values > floor, values.clamp_min(1e-300).rsqrt(), torch.zeros_like(values))


def orthonormal(tall: Tensor, rank: int | None = None) -> Tensor:
    """(a, rank) orthonormal columns, the leading left singular vectors of `tall` (a, l) in order.

    The Gram loses what is below 1e-7 of the largest singular value; the last step (Newton's for the polar factor)
    brings the columns that remain to working precision: ‖PᵀP − 1‖ falls from e to about ¾·e². Columns beyond the
    rank are zero.
    """
    rank = tall.shape[1] if rank is None else rank
    wide = tall.double()
    basis = torch.mm(tall, whiten(torch.mm(wide.t(), wide), rank).to(tall.dtype))
    del wide
    gram = torch.mm(basis.t(), basis)
    return basis * 1.5 - torch.mm(basis, gram) * 0.5


def exact_basis(matrix: Tensor, rank: int) -> Tensor:
    """(a, rank) leading left singular vectors of `matrix` (a, b), from its float64 Gram matrix, signs fixed.

    Scratch: 8·a·min(b, 1024) + LAPACK's 16·a² beside three (a, a) matrices of float64; no copy of the matrix.
    """
    short = matrix.shape[0]
    gram = torch.zeros(short, short, dtype=torch.float64, device=matrix.device)
    for start in rounds(range(0, matrix.shape[1], PANEL)):
        panel = matrix[:, start : start + PANEL].double()
        gram.addmm_(panel, panel.t())
    vectors = torch.linalg.eigh(gram)[1]
    return fix_signs(vectors.flip(1)[:, :rank].to(matrix.dtype))


def random_signs(rows: int, columns: int, seed: int, name: str, stream: int, like: Tensor) -> Tensor:
    """(rows, columns) of ±1 in the dtype and on the device of `like`: one bit of addressed noise each."""
    count = rows * columns
    words = random_uint32(seed, name, 0, -(-count // 32), stream=stream, device=like.device)
    places = torch.arange(32, device=like.device)
    bits = words.unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1)
    return bits.view(-1)[:count].view(rows, columns).to(like.dtype).mul_(2.0).sub_(1.0)


def random_basis(
    matrix: Tensor, rank: int, *, oversample: int, power: int, seed: int, name: str, stream: int
) -> Tensor:
    """(a, rank) near the leading left singular vectors of `matrix` (a, b): a randomised SVD from nothing.

    A sketch of rank + oversample columns, `power` iterations with an orthonormalisation in each, and the ordering by
    a last product: 2·power + 2 products with the matrix. Random signs serve as well as Gaussian numbers here and
    cost one bit each. Signs fixed.
    """
    width = min(rank + oversample, *matrix.shape)
    basis = orthonormal(torch.mm(matrix, random_signs(matrix.shape[1], width, seed, name, stream, matrix)))
    for _ in range(power):
        basis = _iterated(matrix, basis)
    return fix_signs(_ordered(matrix, basis, rank))


def warm_basis(matrix: Tensor, start: Tensor, *, power: int, seed: int, name: str, stream: int) -> Tensor:
    """(a, rank) near the leading left singular vectors, by `power` ≥ 1 iterations from an earlier basis `start`.

    Each is two products with the matrix. A column of zeros (a direction the earlier gradients did not have) begins
    at random signs instead, else it would stay zero for ever. Signs follow `start`.
    """
    fresh = random_signs(start.shape[0], start.shape[1], seed, name, stream, start)
    basis = torch.where((start == 0).all(0), fresh * matrix.shape[0] ** -0.5, start)
    for _ in range(power):
        basis = _iterated(matrix, basis)
    turned = torch.where((basis * start).sum(0) < 0, -1.0, 1.0).to(basis.dtype)
    return basis * turned


def _iterated(matrix: Tensor, basis: Tensor) -> Tensor:
    """One power iteration, orthonormal after either product: unscaled, singular values would be squared in float32."""
    images = torch.mm(matrix.t(), basis)
    wide = images.double()
    images = torch.mm(images, whiten(torch.mm(wide.t(), wide), basis.shape[1]).to(images.dtype))
    del wide
    return orthonormal(torch.mm(matrix, images))


def _ordered(matrix: Tensor, basis: Tensor, rank: int) -> Tensor:
    """`basis` (a, l) turned within its span so that its columns are singular vectors of the matrix there."""
    images = torch.mm(matrix.t(), basis).double()
    vectors = torch.linalg.eigh(torch.mm(images.t(), images))[1]
    return torch.mm(basis, vectors.flip(1)[:, :rank].to(basis.dtype))


def fisher_solve(history: Tensor, gram: Tensor, slot: int, damping: float | Tensor) -> Tensor:
    """(k,) (λ·1 + H·Hᵀ)⁻¹·h for the column h of H in `slot`, by way of an (s, s) system.

    Woodbury's formula subtracts two nearly equal vectors when h is itself a column of H; the same vector is
    H·(λ·1 + Hᵀ·H)⁻¹·e, without any cancellation, and one product less. The Gram matrix is kept and solved in
    float64, since vectors of successive steps are nearly alike.

    Args:
        history: (s, k), the columns of H as rows; empty ones zero.
        gram: (s, s) float64, HᵀH.
        damping: λ > 0.
    """
    size = gram.shape[0]
    system = gram + damping * torch.eye(size, dtype=gram.dtype, device=gram.device)
    unit = torch.zeros(size, 1, dtype=gram.dtype, device=gram.device)
    unit[slot] = 1.0
    weights = torch.cholesky_solve(unit, torch.linalg.cholesky(system))
    return torch.mm(history.t(), weights.to(history.dtype)).squeeze(1)
