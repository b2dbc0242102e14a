"""Lion: the sign of a blended gradient, one moment. 4 bytes of state per float32 parameter instead of 8.

Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv 2302.06675, algorithm 2:

    u ← sign(β₁·m + (1−β₁)·g)        every number moves by exactly lr
    p ← (1 − lr·wd)·p − lr·u
    m ← β₂·m + (1−β₂)·g              after the move, with its own decay

Because each move is lr, the rate is taken 3 to 10 times below AdamW's and the decay that much above it (section 5).
Where blend and gradient are 0 nothing moves but the decay: sign(0) = 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.sharded import Part
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import Elementwise, wide_dtype
from skimp.optim.options import check_dtype, check_options, lr_of, state_dtype
from skimp.optim.state import Spec


class Lion(UpdateRule):
    """Lion, element-wise: any sharding, any shape.

    Args:
        params: parameters, groups or `named_parameters()`; float32, float64, or bf16 with stochastic rounding.
        lr, betas, weight_decay: β₁ blends the move, β₂ keeps the moment.
        states: "fp32", or "bf16" for 2 bytes a number, rounded at random.
        seed: with the parameter's name and step the address of the rounding noise.

    Raises:
        SkimpError: an option out of range, or a dtype it cannot step.
    """

    rule: ClassVar[str] = "lion"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
        states: Literal["fp32", "bf16"] = "fp32",
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, 1.0, weight_decay, eps_min=0.0)
        self.states_dtype = state_dtype(self.rule, states)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        return {"m": (tuple(shape), self.states_dtype or wide_dtype(dtype))}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        lr, (beta1, beta2) = lr_of(group), group["betas"]
        scalars = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr, 1.0 - lr * group["weight_decay"])
        lion(part, p, grad, [state["m"]], scalars, state["step"], group["seed"])


def lion_chunk(
    p: Tensor, g: Tensor, states: Sequence[Tensor], scratch: Sequence[Tensor], scalars: Sequence[float]
) -> None:
    """See the module; `g` becomes the new weights."""
    (m,), (u,) = states, scratch
    beta1, rest1, beta2, rest2, lr, decay = scalars
    torch.mul(m, beta1, out=u)
    u.add_(g, alpha=rest1).sign_().mul_(lr)
    m.mul_(beta2).add_(g, alpha=rest2)
    torch.mul(p, decay, out=g)
    g.sub_(u)


lion = Elementwise("lion", lion_chunk, states=1, scratch=1)
