"""Which singular vectors train next, and bringing them to the front; and the new decomposition at the end of a round.

r of k vectors are drawn one after the other without replacement, vector i with weight
p_i = mix / k + (1 - mix) sigma_i / sum(sigma): the uniform part keeps every direction in play, sigma = 0 among them.
Drawn as a race: the r smallest of e_i / p_i with e_i = -ln(1 - u_i), u_i from addressed noise, come in the very order
of draws one after the other. So the first drawn follows p, the set as a whole does not follow r p.

Everything is a product or a gather on the tensor's own device; nothing reaches the host.

Paper: "Sparse Spectral Training", Zhao et al., 2024, arXiv 2405.15481, sections 3.3 and 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core import noise
from skimp.core.linalg import fix_signs


def probabilities(sigma: Tensor, mix: float) -> Tensor:
    """(k,) float64: mix / k + (1 - mix) sigma / sum(sigma); uniform where all sigma are 0."""
    wide = sigma.double()
    total = wide.sum()
    share = torch.where(total > 0, wide / total.clamp_min(1e-300), torch.full_like(wide, 1.0 / wide.numel()))
    return share.mul(1.0 - mix).add_(mix / wide.numel())


def sampled(sigma: Tensor, rank: int, mix: float, seed: int, name: str, iteration: int) -> Tensor:
    """(rank,) int64: indices into sigma in the order in which they are drawn."""
    u = noise.uniform(seed, name, 0, sigma.numel(), stream=iteration, device=sigma.device).double()
    race = torch.log1p(-u).neg_().div_(probabilities(sigma, mix))
    return torch.argsort(race, stable=True)[:rank]


@torch.no_grad()
def bring_forward(u: Tensor, v: Tensor, order: Tensor, chosen: Tensor) -> None:
    """Reorder the rows of u (k, outputs) and v (k, inputs) in place so that those of `chosen` come first.

    Rows move whole: none changes a bit. Chosen ones and the rest each stand in the order of sigma, so the layout does
    not depend on earlier draws. Scratch: one of u and v.
    """
    last = torch.ones_like(order)
    last.index_fill_(0, chosen, 0)
    new = torch.argsort(last, stable=True)
    rows = torch.argsort(order).index_select(0, new)
    u.copy_(u.index_select(0, rows))
    v.copy_(v.index_select(0, rows))
    order.copy_(new)


@torch.no_grad()
def decompose(weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> None:
    """Singular values and vectors of `weight` (outputs, inputs) into u, v and sigma, falling, signs fixed.

    LAPACK's divide and conquer in the weight's dtype; float32 is orthonormal to about 1e-6.
    """
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    fixed = fix_signs(left)
    turned = (fixed * left).sum(0).sign()
    u.copy_(fixed.t())
    v.copy_(right.mul_(turned.unsqueeze(1)))
    sigma.copy_(values)


@torch.no_grad()
def dense(u: Tensor, v: Tensor, sigma: Tensor, order: Tensor, keep: float = 1.0) -> Tensor:
    """(outputs, inputs) W = sum_j sigma[order_j] u_j v_j'.

    Args:
        keep: share of the singular values, the largest, that are kept; the others count as 0.
    """
    scale = sigma.index_select(0, order)
    if keep < 1.0:
        count = max(1, round(keep * scale.numel()))
        scale = torch.where(torch.argsort(torch.argsort(scale, descending=True)) < count, scale, 0.0)
    return torch.mm(u.t() * scale, v)


def decompose_bytes(outputs: int, inputs: int, itemsize: int = 4) -> tuple[int, int]:
    """Most bytes that a new decomposition of one layer needs beside what rests: (tensors, LAPACK's own scratch).

    Tensors: the weight, the left and right vectors, and the larger of LAPACK's copy of the weight and two copies of the
    left vectors for their signs; 16 KiB for all that is short. Scratch, outside the allocator: 4 k^2 + 7 k numbers and
    8 k int32, as LAPACK's divide and conquer states them.
    """
    k = min(outputs, inputs)
    numbers = outputs * inputs + k * (outputs + inputs) + max(outputs * inputs, 2 * k * outputs) + 4 * k
    return itemsize * numbers + (16 << 10), itemsize * (4 * k * k + 7 * k) + 32 * k
