"""Muon: momentum, orthogonalised; 4 bytes of state per hidden weight instead of 8. AdamW for everything else.

Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv 2502.16982, section 2.2 (the form used for Moonlight),
after Jordan et al., 2024:

    M ← μ·M + G;   U ← G + μ·M (Nesterov), else M
    O ← NS(U), near U's polar factor (`skimp.core.newton_schulz`)
    W ← (1 − lr·wd)·W − lr·s·O

with s = 0.2·√max(m, n) ("match-rms"), which gives O about the size of an AdamW update, so that AdamW's rate serves; or
s = √max(1, m/n) for m outputs of n inputs ("spectral", with rates near 0.02).

Hidden matrices take this rule: attention and MLP, low-rank factors. Embeddings, head, norms and biases take AdamW with
the same rate, as the roles of their groups say (`role_groups`). A fused query-key-value layer is orthogonalised in its
three parts. More than two dimensions are matrices in the last two, each for itself.

Matrices of one shape that are stepped together (`step`, gradients held) are orthogonalised in one stack, which on small
matrices is several times faster; the numbers do not depend on the stack. A shard of a matrix is refused: orthogonal
rows of a part are not rows of an orthogonal whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.sharded import Part, is_sharded
from skimp.optim.adam_mini import check_role
from skimp.optim.adamw import fused_adamw_
from skimp.optim.adamw_bf16 import rounded_adamw_
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.muon_step import muon, stack_at_once
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.role import TABLES
from skimp.optim.state import Spec


class Muon(UpdateRule):
    """Muon with AdamW. State of a hidden matrix: m shaped like it; of the rest: m and v, float32 (float64 for float64).

    Args:
        params: groups with roles: `role_groups(model.named_parameters(), weight_decay, roles(model))`.
        lr, weight_decay: of both rules.
        momentum, nesterov, ns_steps: of hidden matrices. scale: "match-rms" or "spectral".
        betas, eps: of AdamW.

    Raises:
        SkimpError: an option out of range, groups without roles, a sharded matrix.
    """

    rule: ClassVar[str] = "muon"
    by_role = True

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 4e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        scale: Literal["match-rms", "spectral"] = "match-rms",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        check_range(self.rule, momentum=(momentum, 0.0, 0.9999), ns_steps=(ns_steps, 1, 20))
        check_range(self.rule, scale=(float(scale in ("match-rms", "spectral")), 1.0, 1.0))
        own = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "scale": scale}
        shared = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {"lr": lr, **own, **shared})

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
        return {"m": spec["m"]} if self.hidden(p) else spec

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        """Of AdamW's side; a hidden matrix has m alone."""
        wide = wide_dtype(dtype)
        return {"m": (tuple(shape), wide), "v": (tuple(shape), wide)}

    def rule_for(self, p: Tensor) -> str:
        return self.rule if self.hidden(p) else f"{self.rule} (adamw)"

    def together(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Stacks of hidden matrices of one shape and with the same options; the rest, DTensors too, one by one."""
        if self.away is not None:
            return super().together(parameters)
        stacks: dict[Any, list[list[Tensor]]] = {}
        for p in parameters:
            alone = is_sharded(p) or not self.hidden(p)
            key: Any = id(p) if alone else (p.shape, p.dtype, *_options(self.group_of(p)))
            open_ = stacks.setdefault(key, [])
            if not open_ or len(open_[-1]) >= stack_at_once(p):
                open_.append([])
            open_[-1].append(p)
        return [stack for stacks_ in stacks.values() for stack in stacks_]

    @torch.no_grad()
    def step_parameters(self, items: Sequence[tuple[Tensor, Tensor]]) -> None:
        if len(items) == 1 or not self.hidden(items[0][0]):
            super().step_parameters(items)
            return
        group = self.group_of(items[0][0])
        states = [self.begin_update(p, grad) for p, grad in items]
        self._orthogonalised(
            [p for p, _ in items],
            [grad.contiguous() for _, grad in items],
            states,
            group,
            [self.name_of(p) for p, _ in items],
        )

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        if is_hidden(p, group):
            self._orthogonalised([p], [grad], [state], group, [part.name])
        elif p.dtype == torch.bfloat16:
            rounded_adamw_(part, p, grad, state, group)
        else:
            fused_adamw_(p, grad, state, group)

    def _orthogonalised(
        self,
        ps: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        group: dict[str, Any],
        names: list[str],
    ) -> None:
        for name, grad in zip(names, grads, strict=True):
            check_dtype(self.rule, name, grad)
        muon(ps, grads, [s["m"] for s in states], [s["step"] for s in states], names, group, lr_of(group))


def is_hidden(p: Tensor, group: dict[str, Any]) -> bool:
    """A matrix between hidden states, by its group's role."""
    return p.ndim > 1 and group["role"] not in (*TABLES, "vector")


def _options(group: dict[str, Any]) -> tuple[Any, ...]:
    """What two groups must share for their matrices to be one stack."""
    options = [group[key] for key in ("momentum", "nesterov", "ns_steps", "scale", "weight_decay", "seed", "columns")]
    lr = group["lr"]
    return (*options, id(lr) if isinstance(lr, Tensor) else lr, group["role"] == "qkv")
