"""Weight refactorization and momentum reset: what keeps a product of two thin matrices trainable.

Glentis et al., "Scalable Parameter and Memory Efficient Pretraining for LLM", 2025, arXiv 2505.22922, section 4. Now
and then a pair with weight B·A (B m × r, A r × n) becomes B ← U·√S, A ← √S·Vᵀ of the product's own singular values: the
weight stays, and the factors are balanced, BᵀB = A·Aᵀ = S, which is where its Hessian is best conditioned. Moments that
lived in the old coordinates are then set to zero. Here without ever forming m × n: two thin QRs and one r × r SVD, in
float64.

A direction whose singular value is 0 would be dead for ever, since both its row and its column become 0 and with them
both gradients. So a pair whose smallest singular value is below 1e-4 of its largest is left as it is (a LoRA at step 0,
where B is 0, among them), and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.read import read
from skimp.core.sharded import is_sharded, local
from skimp.optim.elsewhere import at_hand

#: Below this part of the largest singular value a direction counts as dead.
DEAD = 1e-4


@torch.no_grad()
def refactor_(up: Tensor, down: Tensor) -> bool:
    """Balance one pair in place; the product stays to rounding, signs are fixed so that processes agree.

    Args:
        up: B (m, r). down: A (r, n).

    Returns:
        False where the pair was left alone: some direction is dead, or a number is not finite.

    Raises:
        SkimpError: shapes that do not multiply, or a shard.
    """
    if up.ndim != 2 or down.ndim != 2 or up.shape[1] != down.shape[0] or is_sharded(up) or is_sharded(down):
        raise SkimpError(
            "a pair of whole matrices (m, r) and (r, n)",
            f"{tuple(up.shape)} and {tuple(down.shape)}{', sharded' if is_sharded(up) or is_sharded(down) else ''}",
            "the factors of a product are found from both in full",
        )
    basis_up, r_up = torch.linalg.qr(up.double())
    basis_down, r_down = torch.linalg.qr(down.double().mT)
    core = r_up @ r_down.mT
    if read(core.isfinite().all(), expect=1.0) == 0.0:
        return False
    u, s, vt = torch.linalg.svd(core, full_matrices=False)
    rank = up.shape[1]
    if s.numel() < rank or read(s[-1] - DEAD * s[0], expect=1.0) < 0.0 or read(s[0], expect=1.0) == 0.0:
        return False
    left, right = basis_up @ u, basis_down @ vt.mT
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0)
    root = s.sqrt()
    up.copy_(left * (sign * root))
    down.copy_((right * (sign * root)).mT)
    return True


@torch.no_grad()
def reset_moments(optimizer: Any, parameters: Iterable[Tensor] | None = None) -> int:
    """Set the moments of `parameters` (None: of all) to zero, and their steps too, so that bias correction begins anew.

    What a rule needs to go on (Dion's Q) stays: `UpdateRule.kept_on_reset`.

    Returns:
        How many parameters had moments.
    """
    chosen: Sequence[Tensor] = optimizer.parameters() if parameters is None else list(parameters)
    count = 0
    for p in chosen:
        state = optimizer.state.get(p)
        if not state:
            continue
        count += 1
        for key in optimizer.numbers_of(p):
            state[key] = 0
        with at_hand(optimizer, p):
            for key, value in state.items():
                if isinstance(value, Tensor) and key not in optimizer.kept_on_reset:
                    local(value).zero_()
    return count


def restart_(pairs: Iterable[tuple[Tensor, Tensor]], optimizer: Any) -> tuple[int, int]:
    """Refactor every pair and reset the moments of those that changed: an action for `skimp.core.events.every`.

    Returns:
        (pairs refactored, pairs left alone).
    """
    done = left = 0
    for up, down in pairs:
        if refactor_(up, down):
            reset_moments(optimizer, [up, down])
            done += 1
        else:
            left += 1
    return done, left
