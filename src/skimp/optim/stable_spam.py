"""Stable-SPAM: gradients clipped by their history and scaled to its norm, and momentum resets.

Huang et al., "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam", 2025, arXiv 2502.17055, section 3.
Three numbers a tensor follow the gradient, each a moving mean; a prime is its value with the bias corrected:

    T ← γ₃·T + (1−γ₃)·max|g|;   where |g| > T': g ← g/max|g| · T'
    n ← ‖g‖;   μ ← γ₁·μ + (1−γ₁)·n;   ν ← γ₂·ν + (1−γ₂)·n²
    g ← g/n · μ' / (√ν' + eps)
    every `every` steps both moments become 0 and their step begins anew; then AdamW, decay first

The three numbers outlive the resets, and so does their step. They are functions of the whole tensor, so a shard is
refused. A tensor whose gradient is 0 is not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.core.workspace import declare_workspace
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.restarts import restart_at
from skimp.optim.rowwise import Rows
from skimp.optim.state import Spec


class StableSPAM(UpdateRule):
    """Stable-SPAM. State: m and v shaped like the parameter, and history (3,): T, μ, ν.

    Args:
        params: parameters, groups or `named_parameters()`; float32, float64, or bf16 with stochastic rounding.
        gammas: (γ₁, γ₂, γ₃). every: steps between resets, 0 for none; warmup: steps over which the rate climbs back.

    Raises:
        SkimpError: an option out of range, a dtype it cannot step, or a sharded parameter.
    """

    rule: ClassVar[str] = "stable-spam"
    locality = "matrix"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        gammas: tuple[float, float, float] = (0.7, 0.9, 0.999),
        eps: float = 1e-8,
        every: int = 1000,
        warmup: int = 0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        if len(gammas) != 3 or not all(0 <= g < 1 for g in gammas):
            raise SkimpError(f"{self.rule}: gammas three numbers in [0, 1)", repr(gammas))
        longest = max(0, every - 1) if every else float("inf")
        check_range(self.rule, every=(every, 0, float("inf")), warmup=(warmup, 0, longest))
        own = {"betas": betas, "gammas": gammas, "eps": eps, "every": every, "warmup": warmup}
        super().__init__(params, {"lr": lr, **own, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        wide = wide_dtype(dtype)
        return {"m": (tuple(shape), wide), "v": (tuple(shape), wide), "history": ((3,), wide)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        step, lr, (beta1, beta2) = state["step"], lr_of(group), group["betas"]
        at = restart_at(step, group["every"], group["warmup"])
        scalars = [beta1, beta2, group["eps"], at.scale * lr / (1.0 - beta1**at.count)]
        scalars += [math.sqrt(1.0 - beta2**at.count), 1.0 - lr * group["weight_decay"], float(at.reset)]
        scalars += [x for gamma in group["gammas"] for x in (gamma, 1.0 / (1.0 - gamma**step))]
        held = [state["m"], state["v"], state["history"]]
        stable_spam(p, grad, held, scalars, key64(group["seed"], part.address), step)


@torch.library.custom_op(
    "skimp::stable_spam",
    mutates_args=("p", "states"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!)[] states, float[] scalars, int key, int step) -> ()",
)
def stable_spam(p: Tensor, g: Tensor, states: list[Tensor], scalars: list[float], key: int, step: int) -> None:
    """One step in place; `scalars`: β₁, β₂, eps, size, √(1−β₂ᵏ), decay, reset, and each γ with its correction."""
    if p.numel() == 0:
        return
    beta1, beta2, eps, size, root_bias2, decay, reset, gamma1, fix1, gamma2, fix2, gamma3, fix3 = scalars
    work = Rows(p, g, key)
    m, v = (t.view(work.rows, work.columns) for t in states[:2])
    largest, mean, power = states[2].unbind()
    top = torch.zeros_like(largest)
    for here in work.chunks():
        grad, u, _, row = work.read(here)
        torch.maximum(top, torch.amax(torch.abs(grad, out=u), dim=1, out=row).amax(), out=top)
    largest.mul_(gamma3).add_(top, alpha=1.0 - gamma3)
    limit = largest * fix3
    # The largest number comes down to the limit and the others above it in proportion.
    shrink = limit / top.clamp(min=torch.finfo(top.dtype).tiny)
    work.total.zero_()
    for here in work.chunks():
        clipped = _clip(work, here, limit, shrink)
        work.total.add_(torch.sum(clipped.mul_(clipped), dim=1, out=work.row[: clipped.shape[0]]).sum())
    norm = work.total.sqrt_()
    mean.mul_(gamma1).add_(norm, alpha=1.0 - gamma1)
    power.mul_(gamma2).addcmul_(norm, norm, value=1.0 - gamma2)
    scale = (mean * fix1) / ((power * fix2).sqrt_().add_(eps)) / norm.clamp(min=torch.finfo(torch.float32).tiny)
    scale.clamp_(max=torch.finfo(torch.float32).max)  # of a gradient of zeros: infinity times 0 is NaN
    for here in work.chunks():
        grad = _clip(work, here, limit, shrink).mul_(scale)
        first, second = m[here], v[here]
        if reset:
            first.zero_()
            second.zero_()
        first.mul_(beta1).add_(grad, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        torch.sqrt(second, out=grad).div_(root_bias2).add_(eps)
        work.write(here, torch.div(first, grad, out=grad).mul_(size), decay, step)


def _clip(work: Rows, here: slice, limit: Tensor, shrink: Tensor) -> Tensor:
    """The gradient of these rows, what is above the limit shrunk, in the first buffer."""
    grad, u, w, _ = work.read(here)
    torch.mul(grad, shrink, out=u)
    torch.abs(grad, out=w)
    # `bad` is taken by the numbers that are not finite, so the comparison goes into the third buffer: 1 where clipped.
    torch.gt(w, limit, out=w)
    return grad.add_(u.sub_(grad).mul_(w))


@stable_spam.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::stable_spam")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p = args[0]
    if p.numel() == 0:
        return 0
    return Rows.nbytes(p) + 7 * wide_dtype(p.dtype).itemsize
