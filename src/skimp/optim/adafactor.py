"""Adafactor: the second moment as a row and a column, no first moment: m + n numbers of state for m × n weights.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018, arXiv 1804.04235, algorithm 4:

    β ← 1 − t^−decay                              so that the first step sees its own gradient alone
    R, C ← β·(R, C) + (1−β)·means of g² + 1e-30
    u ← g / √(R·Cᵀ / mean R);   u ← u / max(1, rms(u) / clip)
    m ← β₁·m + (1−β₁)·u                           with `momentum` only
    p ← (1 − lr·wd)·p − lr·u                      lr times max(1e-3, rms(p)) with `relative`

The rate is the recipe's: the paper's own schedule min(1e-2, 1/√t) is a schedule like any other, and a rule that ignores
the rate it is given is the usual complaint about this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.core.workspace import declare_workspace
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.factored import average_squares_, divide_by_root_, limit_, mean_row_
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.rowwise import Rows, sheet
from skimp.optim.state import Spec

#: Added to g², and the least rms(p) of `relative`.
EPS = (1e-30, 1e-3)


class Adafactor(UpdateRule):
    """Adafactor. State of a matrix: rows (m,), columns (n,); of a vector v (n,); with momentum m shaped like it.

    Tensors of more than two dimensions are taken as (all but the last, last).

    Args:
        params: parameters, groups or `named_parameters()`; float32, float64, or bf16 with stochastic rounding.
        decay: c in β = 1 − t^−c. clip: the largest root mean square of an update. momentum: β₁; 0 keeps no moment.
        relative: the rate counts in parts of the weight's root mean square.

    Raises:
        SkimpError: an option out of range, a dtype it cannot step, or a sharded parameter.
    """

    rule: ClassVar[str] = "adafactor"
    locality = "matrix"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        decay: float = 0.8,
        clip: float = 1.0,
        momentum: float = 0.0,
        relative: bool = False,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, (momentum, 0.0), 1.0, weight_decay, eps_min=0.0)
        check_range(self.rule, decay=(decay, 0.0, 1.0), clip=(clip, 1e-12, float("inf")))
        own = {"decay": decay, "clip": clip, "momentum": momentum, "relative": relative}
        self.momentum = momentum > 0
        super().__init__(params, {"lr": lr, **own, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        moment: Spec = {"m": (tuple(shape), wide_dtype(dtype))} if self.momentum else {}
        return {**factored_spec(shape, dtype), **moment}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        beta = 1.0 - float(state["step"]) ** -group["decay"]
        scalars = [beta, group["clip"], group["momentum"], lr_of(group), group["weight_decay"]]
        held = [state[key] for key in ("v", "rows", "columns", "m") if key in state]
        adafactor(p, grad, held, scalars, group["relative"], key64(group["seed"], part.address), state["step"])


def factored_spec(shape: Sequence[int], dtype: torch.dtype, mark: str = "") -> Spec:
    """Rows and columns of a matrix; v of a vector."""
    m, n = sheet(tuple(shape))
    wide = wide_dtype(dtype)
    if len(shape) < 2:
        return {f"v{mark}": (tuple(shape), wide)}
    return {f"rows{mark}": ((m,), wide), f"columns{mark}": ((n,), wide)}


@torch.library.custom_op(
    "skimp::adafactor",
    mutates_args=("p", "states"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!)[] states, float[] scalars, bool relative, int key, int step) -> ()",
)
def adafactor(
    p: Tensor, g: Tensor, states: list[Tensor], scalars: list[float], relative: bool, key: int, step: int
) -> None:
    """One step in place; `states`: v, or rows and columns; then m where there is one."""
    beta, clip, momentum, lr, weight_decay = scalars
    if p.numel() == 0:
        return
    flat = p.ndim < 2
    rows, columns = states[0].view(-1), None if flat else states[1]
    m = states[-1].view(sheet(tuple(p.shape))) if momentum else None
    work = Rows(p, g, key)
    average_squares_(work, rows, columns, beta, EPS[0])
    mean_row_(work, rows)
    factor = limit_(work, rows, columns, clip)
    size = torch.full_like(work.total, lr)
    if relative:
        size.mul_(root_mean_square(work).clamp_(min=EPS[1]))
    for here in work.chunks():
        u, _, _, _ = work.read(here)
        divide_by_root_(u, work, here, rows, columns).mul_(factor)
        if m is not None:
            m[here].mul_(momentum).add_(u, alpha=1.0 - momentum)
            u.copy_(m[here])
        work.write(here, u.mul_(size), 1.0 - lr * weight_decay, step)


def root_mean_square(work: Rows) -> Tensor:
    """rms(p) as a new () float64 tensor."""
    squares = torch.zeros_like(work.total)
    for here in work.chunks():
        n = here.stop - here.start
        w = work.w[:n].copy_(work.p[here])
        squares.add_(torch.sum(w.mul_(w), dim=1, out=work.row[:n]).sum())
    return squares.div_(work.rows * work.columns).sqrt_()


@adafactor.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::adafactor")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return Rows.nbytes(args[0]) + (28 if args[4] else 16) if args[0].numel() else 0
