"""Dion: momentum orthogonalised in rank r by one power iteration a step, what was not applied kept as momentum.

Ahn et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv 2504.05295, algorithm 1:

    M ← M + G
    P ← orth(M·Q);   R ← Mᵀ·P                       P (m × r) orthonormal, Q from the last step
    M ← M − (1 − μ)·P·Rᵀ                            error feedback: what is applied fades, the rest stays whole
    Q ← R with columns of length 1                  the new Q, which this update already uses
    W ← (1 − lr·wd)·W − lr·√(m/n)·P·Qᵀ              m outputs of n inputs

Hidden matrices take this rule; embeddings, head and vectors take AdamW, as in `muon`. Q begins with addressed normals,
the same on every process. `orth` is `skimp.core.cholesky_qr`. A direction in which R is below 1e-6 of its longest
column is dead (a rank-deficient or zero momentum): its length-1 column would be rounding noise, so it moves nothing and
Q keeps its column. State: m·n + n·r numbers instead of 2·m·n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.noise import normal
from skimp.core.sharded import Part, local
from skimp.optim.adam_mini import check_role
from skimp.optim.adamw import fused_adamw_
from skimp.optim.adamw_bf16 import rounded_adamw_
from skimp.optim.base import UpdateRule
from skimp.optim.dion_step import dion
from skimp.optim.elementwise import wide_dtype
from skimp.optim.elsewhere import at_hand
from skimp.optim.muon import is_hidden
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.state import Spec


class Dion(UpdateRule):
    """Dion with AdamW. State of a hidden matrix: m shaped like it and q (n, r); of the rest m and v.

    More than two dimensions are taken as (all but the last, last).

    Args:
        params: groups with roles: `role_groups(model.named_parameters(), weight_decay, roles(model))`.
        rank: r as a share of the smaller side, rounded up. momentum: μ.
        betas, eps: of AdamW.

    Raises:
        SkimpError: an option out of range, groups without roles, a sharded matrix.
    """

    rule: ClassVar[str] = "dion"
    by_role = True
    kept_on_reset = ("q",)

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        rank: float = 0.25,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        check_range(self.rule, rank=(rank, 1e-6, 1.0), momentum=(momentum, 0.0, 0.9999))
        self.rank = rank
        own = {"momentum": momentum, "betas": betas, "eps": eps}
        super().__init__(params, {"lr": lr, **own, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)
        check_role(self.rule, name, self.group_of(p))

    def hidden(self, p: Tensor) -> bool:
        """Whether `p` is orthogonalised."""
        return is_hidden(p, self.group_of(p))

    def locality_of(self, p: Tensor) -> str:
        return "matrix" if self.hidden(p) else "element"

    def part_spec(self, p: Tensor) -> Spec:
        spec = super().part_spec(p)
        if not self.hidden(p):
            return spec
        columns = p.shape[-1]
        rank = math.ceil(self.rank * min(columns, p.numel() // max(1, columns)))
        return {"m": spec["m"], "q": ((columns, rank), wide_dtype(p.dtype))}

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        """Of AdamW's side."""
        wide = wide_dtype(dtype)
        return {"m": (tuple(shape), wide), "v": (tuple(shape), wide)}

    def init_state(self, p: Tensor) -> dict[str, Any]:
        fresh = "step" not in self.state[p]
        state = super().init_state(p)
        if fresh and self.hidden(p):
            seed, q = self.group_of(p)["seed"], local(state["q"])
            with torch.no_grad(), at_hand(self, p):
                q.copy_(normal(seed, f"{self.name_of(p)}.q", 0, q.numel(), device=q.device).view(q.shape))
        return state

    def rule_for(self, p: Tensor) -> str:
        return self.rule if self.hidden(p) else f"{self.rule} (adamw)"

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        if is_hidden(p, group):
            dion(part, p, grad, state, group, lr_of(group))
        elif p.dtype == torch.bfloat16:
            rounded_adamw_(part, p, grad, state, group)
        else:
            fused_adamw_(p, grad, state, group)
