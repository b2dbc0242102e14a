"""The polar factor U·Vᵀ of a matrix by Newton–Schulz steps: matrix products only, many matrices of a shape at once.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, and Liu et al., "Muon is Scalable for
LLM Training", 2025, arXiv 2502.16982, section 2.1. With X = M / ‖M‖_F, five times

    A ← X·Xᵀ;  B ← b·A + c·A²;  X ← a·X + B·X              (a, b, c) = (3.4445, −4.7750, 2.0315)

takes every singular value above 0.003 of the norm into about [0.7, 1.2]: fast, not exact. The coefficients that
converge to 1, (15, −10, 3)/8, need twelve steps for the same. Wide matrices are taken as they are, tall ones
transposed, so that A has the smaller side.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: Added to the Frobenius norm: a zero matrix stays zero.
EPS = 1e-7


class NewtonSchulz:
    """Scratch for a stack of matrices of one shape.

    Args:
        count, rows, columns: of the stack; `x` and its like are (count, short side, long side).
    """

    def __init__(self, count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tall = rows > columns
        short, long = min(rows, columns), max(rows, columns)
        self.x, self.y = (torch.empty(count, short, long, dtype=dtype, device=device) for _ in range(2))
        self.a, self.b = (torch.empty(count, short, short, dtype=dtype, device=device) for _ in range(2))
        self.norm = torch.empty(count, 1, 1, dtype=dtype, device=device)

    @staticmethod
    def nbytes(count: int, rows: int, columns: int, width: int) -> int:
        """Bytes of the scratch, `width` a number."""
        short = min(rows, columns)
        return width * count * (2 * rows * columns + 2 * short * short + 1)

    def slot(self, index: int) -> Tensor:
        """Where matrix `index` goes and its polar factor comes from, (rows, columns)."""
        return self.x[index].mT if self.tall else self.x[index]

    def run(self, count: int, steps: int) -> None:
        """The polar factors of the first `count` matrices, in place."""
        x, y, a, b, norm = (t[:count] for t in (self.x, self.y, self.a, self.b, self.norm))
        torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, out=norm)
        x.div_(norm.add_(EPS))
        first, second, third = COEFFICIENTS
        for _ in range(steps):
            torch.bmm(x, x.mT, out=a)
            torch.baddbmm(a, a, a, beta=second, alpha=third, out=b)
            torch.baddbmm(x, b, x, beta=first, out=y)
            x.copy_(y)


def newton_schulz(m: Tensor, steps: int = 5) -> Tensor:
    """A new tensor with the near-polar factor of every matrix in the last two dimensions; float32 or float64."""
    shape = m.shape
    stack = m.reshape(-1, *shape[-2:])
    work = NewtonSchulz(stack.shape[0], shape[-2], shape[-1], m.dtype, m.device)
    for i in range(stack.shape[0]):
        work.slot(i).copy_(stack[i])
    work.run(stack.shape[0], steps)
    return torch.stack([work.slot(i) for i in range(stack.shape[0])]).view(shape)
