"""AdamW with states in the parameter's precision: 8 bytes of state per float32 parameter.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017, arXiv 1711.05101, algorithm 2. The
update is torch's fused kernel, called for one parameter at a time: in place, without temporaries, and equal
to `torch.optim.AdamW(fused=True)` bit for bit. `bf16-mixed` training uses this rule on its float32 master
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.sharded import Part
from skimp.optim.base import UpdateRule
from skimp.optim.options import check_options, lr_of
from skimp.optim.state import Spec


class AdamW(UpdateRule):
    """AdamW.

    Args:
        params: parameters, groups or `named_parameters()`; float32 or float64.
        lr, betas, eps, weight_decay: as in torch. `lr` may be a tensor.

    Raises:
        SkimpError: an option out of range, or a parameter of lower precision, in which updates would be lost.
    """

    rule: ClassVar[str] = "adamw"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=0.0)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        if p.dtype not in (torch.float32, torch.float64):
            raise SkimpError(
                f"adamw on parameter '{name}'",
                f"dtype {p.dtype}",
                "rounding to nearest loses every update below the weight's step (bf16: 0.4 % of the weight)",
                (
                    f"adamw-bf16 on bf16 weights: stochastic rounding, {4 * p.numel():,} bytes of state",
                    f"float32 weights with bf16 autocast: {12 * p.numel():,} bytes of weight and state",
                ),
            )

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        return {"m": (tuple(shape), dtype), "v": (tuple(shape), dtype)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        fused_adamw_(p, grad, state, group)


def fused_adamw_(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """torch's fused step on one parameter whose `state` has m and v of its dtype.

    Raises:
        SkimpError: the gradient has another dtype than the parameter.
    """
    if grad.dtype != p.dtype:
        raise SkimpError(
            f"adamw: a {p.dtype} gradient for a {p.dtype} parameter",
            f"{grad.dtype}",
            instead="cast the gradient first",
        )
    if torch.compiler.is_compiling():  # what torch's own fused kernel cannot be part of, but the compiler fuses anyway
        options = {"lr": lr_of(group), "betas": group["betas"], "eps": group["eps"]}
        stepped = adamw_reference(
            p, grad, state["m"], state["v"], state["step"], weight_decay=group["weight_decay"], **options
        )
        for held, new in zip((p, state["m"], state["v"]), stepped, strict=True):
            held.copy_(new)
        return
    # The kernel wants the step as a tensor: 4 bytes that live for the call.
    step = torch.full((), float(state["step"]), dtype=torch.float32, device=p.device)
    torch._fused_adamw_(
        [p],
        [grad],
        [state["m"]],
        [state["v"]],
        [],
        [step],
        lr=lr_of(group),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def adamw_reference(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, out of place, in the dtype it is given (float64 as an oracle): (new p, new m, new v).

    `step` counts from 1.
    """
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    unbiased = m / (1 - beta1**step)
    root = (v / (1 - beta2**step)).sqrt()
    return p * (1 - lr * weight_decay) - lr * unbiased / (root + eps), m, v
