"""An orthonormal basis of a tall matrix's columns from its small Gram matrix: products, one factor, one solve.

Shifted Cholesky QR, three passes (Fukaya et al., "Shifted Cholesky QR for Computing the QR Factorization of
Ill-Conditioned Matrices", 2020, section 3), in float64: orthonormal to about 1e-12 whatever the condition of the
columns. Unlike Householder's in LAPACK it takes the same scratch for every number of threads, so a plan can count it. A
column that depends on the others to 1e-14 comes out as 0 instead of as an arbitrary direction.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Added to the Gram matrix's diagonal, in parts of its trace.
SHIFT = 1e-14
PASSES = 3


def orthonormal_columns(y: Tensor) -> Tensor:
    """A new tensor like `y` (m, r) float64: orthonormal columns of the same spans, in order; dead ones 0."""
    for _ in range(PASSES):
        gram = torch.mm(y.mT, y)
        shift = gram.trace().mul_(SHIFT).add_(1e-300)
        gram.diagonal().add_(shift)
        gram, _ = torch.linalg.cholesky_ex(gram)
        y = torch.linalg.solve_triangular(gram.mT, y, upper=True, left=False)
        del gram
    return y


def orthonormal_bytes(rows: int, rank: int) -> int:
    """Peak bytes of `orthonormal_columns` with an input that nobody else holds."""
    square, tall = 8 * rank * rank, 8 * rows * rank
    return max(tall + 2 * square, square + 2 * tall) + 12
