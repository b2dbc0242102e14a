"""The arithmetic of one AdamW step, shared by the rules that keep coded or rounded state.

In float32, element by element, in this order (decay first, as in PyTorch; eps after bias correction):

    m ← β₁·m + (1−β₁)·g
    v ← β₂·v + ((1−β₂)·g)·g
    p ← (1 − lr·wd)·p − lr/(1−β₁ᵗ) · (m / (√v / √(1−β₂ᵗ) + eps))

An element whose g² is not finite in float32 (g infinite, NaN, or beyond 1.8e19) leaves p alone and clears m
and v: the run stops on the gradient norm anyway, and one bad element must not turn a block of 256 into NaN.
"""

from __future__ import annotations

import math

import torch

#: Elements per chunk of the references.
CHUNK = 2**16

Scalars = tuple[float, float, float, float, float, float, float, float]


def adamw_scalars(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int) -> Scalars:
    """(β₁, 1−β₁, β₂, 1−β₂, √(1−β₂ᵗ), eps, lr/(1−β₁ᵗ), 1−lr·wd) in float64, rounded where used."""
    return (
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        1.0 - lr * weight_decay,
    )


class Buffers:
    """Scratch of the references for chunks of at most `size` elements: 29 bytes per element.

    float32 copies of weight, gradient and moments (16), float32 and float64 scratch (12), a mask (1).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.p, self.g, self.m, self.v, self.scratch = (
            torch.empty(size, dtype=torch.float32, device=device) for _ in range(5)
        )
        self.wide = torch.empty(size, dtype=torch.float64, device=device)
        self.bad = torch.empty(size, dtype=torch.bool, device=device)

    @staticmethod
    def nbytes(size: int) -> int:
        return 29 * size


def adamw_chunk_(b: Buffers, size: int, scalars: Scalars) -> None:
    """One step in place on the first `size` elements of b.p, b.m and b.v; b.g is overwritten.

    Allocates nothing (but 0-dim scalars). The root is taken in float64 and rounded, which gives the correctly
    rounded float32 root on every machine; torch's float32 root may come from a vector library that is an ulp
    off.
    """
    p, g, m, v, scratch, bad = (t[:size] for t in (b.p, b.g, b.m, b.v, b.scratch, b.bad))
    beta1, one_minus_beta1, beta2, one_minus_beta2, root_bias2, eps, step_size, decay = scalars
    torch.mul(g, g, out=scratch)
    scratch.sub_(scratch)  # 0 where finite, NaN elsewhere
    torch.ne(scratch, 0.0, out=bad)
    g.masked_fill_(bad, 0.0)
    torch.mul(g, one_minus_beta1, out=scratch)
    m.mul_(beta1).add_(scratch)
    torch.mul(g, one_minus_beta2, out=scratch)
    v.mul_(beta2).add_(scratch.mul_(g))
    m.masked_fill_(bad, 0.0)
    v.masked_fill_(bad, 0.0)
    scratch.copy_(b.wide[:size].copy_(v).sqrt_())
    scratch.div_(root_bias2).add_(eps)
    torch.div(m, scratch, out=scratch)
    scratch.mul_(step_size)
    torch.mul(p, decay, out=g)
    g.sub_(scratch)
    torch.where(bad, p, g, out=p)
