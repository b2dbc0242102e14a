"""AdamW on pure bf16 weights with stochastic rounding: no float32 master copy.

Bytes per parameter: weight 2, gradient 2, states 2 + 2, in all 8 instead of 16; with float32 states 12.
Zamirai et al., "Revisiting BFloat16 Training", 2020, arXiv 2010.06192, section 4. The update is computed in
float32 and rounded up or down with the probability that keeps its mean; rounded to nearest, every update
under 0.2–0.4 % of a weight would vanish. States in bf16 are rounded stochastically as well: with β₂ = 0.999 a
second moment moves by at most 0.1 % of its distance per step, less than half a bf16 step, and would otherwise
freeze.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.optim.adamw_bf16_step import adamw_bf16
from skimp.optim.base import UpdateRule
from skimp.optim.options import check_options, lr_of
from skimp.optim.state import Spec


class AdamWBF16(UpdateRule):
    """AdamW for bf16 parameters. The arithmetic is that of `skimp.optim.adamw_math`.

    Args:
        params: parameters, groups or `named_parameters()`; bf16 and contiguous.
        lr, betas, eps, weight_decay: as in torch; eps above 0.
        states: dtype of both moments, "bf16" or "fp32".
        seed: with the parameter's name and step the address of the rounding noise: the same on resume.

    Raises:
        SkimpError: an option out of range, or a parameter that is not bf16.
    """

    rule: ClassVar[str] = "adamw-bf16"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        states: Literal["bf16", "fp32"] = "bf16",
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        if states not in ("bf16", "fp32"):
            raise SkimpError("adamw-bf16: states 'bf16' or 'fp32'", repr(states))
        self.states_dtype = torch.bfloat16 if states == "bf16" else torch.float32
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        if p.dtype != torch.bfloat16:
            raise SkimpError(
                f"adamw-bf16 on parameter '{name}'",
                f"dtype {p.dtype}",
                "it rounds to bf16 after every step",
                ("model.to(torch.bfloat16) before the optimizer", f"adamw: {8 * p.numel():,} bytes of state"),
            )

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        return {"m": (tuple(shape), self.states_dtype), "v": (tuple(shape), self.states_dtype)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        rounded_adamw_(part, p, grad, state, group)


def rounded_adamw_(part: Part, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """One step of the operator on a bf16 parameter, with its noise addressed by (seed, name, step, place).

    Raises:
        SkimpError: a gradient that is neither bf16 nor float32.
    """
    check_gradient("adamw-bf16", part.name, grad)
    adamw_bf16(
        p,
        grad,
        state["m"],
        state["v"],
        lr_of(group),
        *group["betas"],
        group["eps"],
        group["weight_decay"],
        state["step"],
        key64(group["seed"], part.address),
        part.offset,
    )


def check_gradient(rule: str, name: str, grad: Tensor) -> None:
    """The kernels read float32 and bf16 gradients.

    Raises:
        SkimpError: any other dtype.
    """
    if grad.dtype not in (torch.float32, torch.bfloat16):
        raise SkimpError(
            f"{rule}: a float32 or bf16 gradient of '{name}'",
            f"{grad.dtype}",
            instead="cast the gradient first",
        )
