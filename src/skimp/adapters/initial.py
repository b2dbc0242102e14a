"""How A and B of an addition begin.

    kaiming     A uniform within 1 / sqrt(inputs), B = 0: step 0 is the base to the bit
    gaussian    A normal with deviation 1 / r, B = 0
    olora       B orthonormal, A upper-trapezoidal: the first r columns of Q and rows of R of W = Q R
    pissa       B = U sqrt(S / s), A = sqrt(S / s) V', the r largest singular triples of W
    pissa-fast  the same from a randomised SVD with four power iterations
    loftq       the same of W - Q, of what the codes of a coded base leave over (`loftq`)

olora and pissa begin with s B A ≠ 0. Their papers take that out of the base, W - s B0 A0; here the base stays as it is
and A0 and B0 are kept beside it, so that y = W x + s (B A - B0 A0) x: the same numbers train, W is never rounded anew
(in bfloat16 or 4 bits it would be), `detach` is exact, other adapters can share the base, and the export is
s [B, -B0] [A; A0], a plain LoRA of rank 2r on the original weights. Price: 4 r (inputs + outputs) bytes, a quarter of
what plain LoRA adds, and two more thin products.

R's first r rows are Q_r' W, so only the thin QR of W's first r columns is made, in float64. Signs are LAPACK's; A0 and
B0 are in the checkpoint and never made again. loftq's make up for what Q lost and stay in; A0 and B0 are kept for its
export alone, which is the same on the original weights.

Papers: "OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models", Büyükakyüz, 2024, arXiv 2406.01775, section
3; "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language Models", Meng et al., 2024,
arXiv 2404.02948, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skimp.core import noise
from skimp.core.linalg import PANEL, exact_basis, random_basis

#: Initialisations from W itself, taken out of what is computed.
FROM_BASE = ("olora", "pissa", "pissa-fast")
#: Of the randomised SVD.
POWER = 4


def draw(init: str, rank: int, inputs: int, seed: int, name: str, like: Tensor) -> Tensor:
    """A (rank, inputs) that depends on (seed, name) alone, not on what was drawn before."""
    if init == "gaussian":
        drawn = noise.normal(seed, name, 0, rank * inputs, device=like.device).mul_(1.0 / rank)
    else:
        drawn = noise.uniform(seed, name, 0, rank * inputs, device=like.device)
        drawn.sub_(0.5).mul_(2.0 / math.sqrt(inputs))
    return drawn.view(rank, inputs).to(like.dtype)


@torch.no_grad()
def from_base(init: str, weight: Tensor, rank: int, scale: float, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """A (rank, inputs) and B (outputs, rank) of W, float32 or wider.

    Args:
        weight: (outputs, inputs), float32 or wider. rank: at most the smaller side. scale: s.
    """
    if init == "olora":
        basis, corner = torch.linalg.qr(weight[:, :rank].double())
        b = basis.to(weight.dtype)
        a = torch.mm(b.t(), weight)
        a[:, :rank] = corner.to(weight.dtype)
        return a, b.contiguous()
    tall = weight.shape[0] > weight.shape[1]
    matrix = weight.t() if tall else weight  # (short, long)
    if init == "pissa":
        basis = exact_basis(matrix, rank)
    else:
        basis = random_basis(matrix, rank, oversample=rank, power=POWER, seed=seed, name=name, stream=0)
    image = torch.mm(basis.t(), matrix)  # S times the other side's vectors, (rank, long)
    root = torch.linalg.vector_norm(image, dim=1).clamp_min_(torch.finfo(image.dtype).tiny)
    root = (root / scale).sqrt()
    short, long = basis * root, image / (root * scale).unsqueeze(1)
    a, b = (short.t(), long.t()) if tall else (long, short)
    return a.contiguous(), b.contiguous()


def scratch(init: str, outputs: int, inputs: int, rank: int, itemsize: int) -> int:
    """Bytes that `from_base` takes at most beside W, what it gives included; LAPACK's own workspace in it."""
    short, long = min(outputs, inputs), max(outputs, inputs)
    copy = 0 if itemsize >= 4 else 4 * outputs * inputs
    given = 4 * rank * (outputs + inputs)
    if init == "olora":
        return copy + 2 * given + 8 * (4 * outputs * rank + 2 * rank * rank)
    if init == "pissa":
        return copy + 3 * given + 8 * short * min(long, PANEL) + 6 * 8 * short * short
    sketch = min(2 * rank, short)
    return copy + 3 * given + 12 * sketch * (outputs + inputs) * 2 + 48 * sketch * sketch
