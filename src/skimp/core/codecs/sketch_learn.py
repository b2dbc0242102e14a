"""A sketch learned with the layer's inputs at hand: what it gets wrong is what the inputs do not see.

With H = E[x x'] of the layer's inputs the error of its outputs is tr((W - Ŵ) H (W - Ŵ)'). Two things lower it. The
grids are k-means weighted by column: the more the outputs hang on column j alone, the nearer its weights shall be to a
value,

    a_j = U_jj^-p,    U the upper Cholesky factor of H^-1, U' U = H^-1.

And the codes are chosen column by column, what each leaves wrong being made good by those after it (Frantar et al.):

    z_ij = argmin_k |C_ik - w_ij|,   w_i,k>j -= (w_ij - C_i,z) / U_jj · U_jk.

Grids come from W as it was, codes from W as it is by then; groups are of neighbours and columns stay where they are. A
column that no input ever used gets weight 0 in the k-means, and keeps its weights: fine-tuning may yet use it. (The
paper's code sets them to 0.)

Source: "Sketch to Adapt: Fine-Tunable Sketches for Efficient LLM Adaptation", Zhang et al., 2025, arXiv 2410.06364,
algorithm 1; "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", Frantar et al., 2022,
arXiv 2210.17323, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core.codecs.sketch import NUMBERS, Sketch, cluster, nearest
from skimp.core.errors import SkimpError
from skimp.core.read import read

#: Columns whose errors reach those after them in one product.
BLOCK = 128
#: Tenfold rises of the damping before a matrix is given up.
TRIES = 4


def inverse_factor(second: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """U (n, n) upper with U' U = (H + d 1)^-1, and which columns are dead (n,) bool.

    Args:
        second: H (n, n), symmetric, its second moments; changed in place. damping: d as a share of H's mean diagonal,
            ten times that where the factor does not exist, up to 10^4 times.

    Raises:
        SkimpError: not finite, or still no factor.
    """
    diagonal = second.diagonal()
    dead = diagonal == 0
    mean = diagonal.mean().clamp_min(torch.finfo(second.dtype).tiny)
    diagonal.masked_fill_(dead, 1.0).copy_(torch.where(dead, mean, diagonal))
    diagonal.add_(damping * mean)
    for attempt in range(TRIES + 1):
        lower, failed = torch.linalg.cholesky_ex(second)
        if not read(failed, expect=0.0):
            inverse = torch.cholesky_inverse(lower)
            del lower  # as many numbers as the moments, each of these
            upper = torch.linalg.cholesky(inverse, upper=True)
            del inverse
            if read(upper.isfinite().all(), expect=1.0):
                return upper, dead
        diagonal.add_(damping * mean * (10.0 ** (attempt + 1) - 10.0**attempt))
    raise SkimpError(
        f"the inverse of {tuple(second.shape)} second moments of a layer's inputs",
        f"no Cholesky factor with {10**TRIES * damping:g} of its mean diagonal added",
        "infinities or NaN in the inputs",
        "weights whose activations are finite in this precision",
    )


@torch.no_grad()
def learn(
    codec: Sketch, weight: Tensor, second: Tensor, *, power: float = 4.0, damping: float = 0.1
) -> dict[str, Tensor]:
    """The parts of `weight`, as `Sketch.encode` gives them, for inputs whose second moments are `second`.

    Memory beside the result: two (n, n), and of rows about 2^20 numbers at a time.

    Args:
        weight: (m, n) float. second: H (n, n) float32 or wider, destroyed. power: p; 0 is plain k-means with
            compensation. damping: see `inverse_factor`.

    Raises:
        SkimpError: a value that float16 cannot hold, or a NaN; second moments that cannot be inverted.
    """
    upper, dead = inverse_factor(second, damping)
    scale = upper.diagonal()
    importance = (scale / scale.amin()).pow(-power).clamp_min_(1e-12).masked_fill_(dead, 0.0)
    if not power:
        importance = torch.where(dead, 0.0, 1.0).to(scale.dtype)
    rows, columns = weight.shape
    width, values = codec.width(columns), 2**codec.bits
    spec = codec.spec(weight.shape)
    parts = {key: torch.empty(size, dtype=kind, device=weight.device) for key, (size, kind) in spec.items()}
    mass = torch.nn.functional.pad(importance.float(), (0, codec.groups * width - columns)).view(codec.groups, width)
    for start in range(0, rows, max(1, NUMBERS // (codec.groups * width))):
        stop = min(rows, start + max(1, NUMBERS // (codec.groups * width)))
        part = weight[start:stop].to(second.dtype, copy=True)  # errors are passed on in it
        padded = torch.nn.functional.pad(part.float(), (0, codec.groups * width - columns))
        grid = cluster(padded.reshape(-1, width), mass.repeat(stop - start, 1), values).to(torch.float16)
        parts["grid"][start:stop] = grid.view(stop - start, codec.groups, values)
        codes = torch.zeros(stop - start, codec.groups * width, dtype=torch.uint8, device=weight.device)
        compensated(part, parts["grid"][start:stop].to(second.dtype), upper, width, codes)
        parts["codes"][start:stop] = codec.packed(codes)
    if rows and not read(codec.finite(parts) & weight.isfinite().all(), expect=1.0):
        raise SkimpError(
            f"codec 'sketch' learned on a tensor of {tuple(weight.shape)}",
            "NaN, infinity, or a value beyond float16 in it",
            "its row's grid would hold it",
            "the weights before they went wrong",
        )
    return parts


def compensated(part: Tensor, grid: Tensor, upper: Tensor, width: int, codes: Tensor) -> None:
    """Codes of some rows, column by column, each error passed on to the columns after it.

    Args:
        part: W's rows (r, n), changed in place. grid: (r, groups, K) sorted. upper: U (n, n). width: columns of a
            group. codes: (r, at least n) uint8, written.
    """
    columns = part.shape[1]
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = part.new_empty(part.shape[0], last - first)
        for j in range(first, last):
            values = grid[:, j // width]
            chosen = nearest(values=part[:, j : j + 1], grid=values)
            codes[:, j] = chosen[:, 0]
            errors[:, j - first] = (part[:, j] - values.gather(1, chosen)[:, 0]) / upper[j, j]
            part[:, j + 1 : last].addr_(errors[:, j - first], upper[j, j + 1 : last], alpha=-1)
        part[:, last:].addmm_(errors, upper[first:last, last:], alpha=-1)


def output_error(weight: Tensor, approximation: Tensor, second: Tensor) -> Tensor:
    """tr((W - Ŵ) H (W - Ŵ)'), 0-dim: the mean square of the outputs' error, summed over outputs."""
    gap = (weight - approximation).to(second.dtype)
    return torch.mm(gap, second).mul_(gap).sum()
