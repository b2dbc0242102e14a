"""Parameter groups by rule: weight decay for matrices, none for norms and biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def decay_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """At most two groups with their names kept: decayed, and not.

    Not decayed: fewer than 2 dimensions (norm gains, biases, scalars) or a name that ends with "bias". Frozen
    parameters are left out; every other one is in exactly one group. An empty group is not returned.
    """
    decayed: list[tuple[str, Tensor]] = []
    plain: list[tuple[str, Tensor]] = []
    for name, p in named_parameters:
        if p.requires_grad:
            (plain if p.ndim < 2 or name.endswith("bias") else decayed).append((name, p))
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
