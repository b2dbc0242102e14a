"""The arithmetic of SPAM on one chunk, shared by its dense and its sparse form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from skimp.optim.elementwise import Elementwise


def spam_chunk(
    p: Tensor, g: Tensor, states: Sequence[Tensor], scratch: Sequence[Tensor], scalars: Sequence[float]
) -> None:
    """See `skimp.optim.spam`; `g` becomes the new weights."""
    (m, v), (u, w) = states, scratch
    beta1, beta2, eps, size, decay, theta, reset = scalars
    if reset:
        m.zero_()
        v.zero_()
    if theta:
        torch.mul(v, theta, out=u)
        u.sqrt_()
        # Where v is 0 there is nothing to compare with: the limit becomes the largest number.
        torch.eq(u, 0.0, out=w)
        u.add_(w.mul_(torch.finfo(w.dtype).max))
        torch.abs(g, out=w)
        torch.minimum(w, u, out=w)
        torch.copysign(w, g, out=g)
    m.mul_(beta1).add_(g, alpha=1.0 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    torch.sqrt(v, out=u)
    torch.div(m, u.add_(eps), out=u)
    torch.sub(p, u, alpha=size, out=g)
    torch.mul(g, decay, out=u)
    g.sub_(u)


spam = Elementwise("spam", spam_chunk, states=2, scratch=2)
