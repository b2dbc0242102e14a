"""Parameter groups: weight decay for matrices, none for norms and biases; and one group for each role."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from skimp.optim.role import Role


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


def role_groups(
    named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float, roles: Mapping[str, Role]
) -> list[dict[str, Any]]:
    """`decay_groups`, cut further so that every group has one role: its "role", "columns" and "head_dim".

    Args:
        roles: of every parameter by name, from `skimp.optim.role.roles(model)`.
    """
    cut: list[dict[str, Any]] = []
    for group in decay_groups(named_parameters, weight_decay):
        kinds: dict[Role, list[tuple[str, Tensor]]] = {}
        for name, p in group["params"]:
            kinds.setdefault(roles[name], []).append((name, p))
        for role, params in kinds.items():
            more = {"role": role.kind, "columns": role.columns, "head_dim": role.head_dim}
            cut.append({**group, "params": params, **more})
    return cut
