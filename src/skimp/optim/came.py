"""CAME: Adafactor's update with momentum, slowed where the momentum and the update disagree.

Luo et al., "CAME: Confidence-guided Adaptive Memory Efficient Optimization", 2023, arXiv 2307.02047, algorithm 2:

    R, C ← β₂·(R, C) + (1−β₂)·means of g² + 1e-30
    u ← g / √(R·Cᵀ / mean R);   u ← u / max(1, rms(u) / clip)
    m ← β₁·m + (1−β₁)·u
    R', C' ← β₃·(R', C') + (1−β₃)·means of (u − m)² + 1e-16          the instability, factored alike
    p ← (1 − lr·wd)·p − lr·m / √(R'·C'ᵀ / mean R')

No bias is corrected: the clip holds the first updates, and with β₃ = 0.9999 the instability takes some 10,000 steps to
settle. A vector keeps its whole second moment and moves by m. State: m·n + 2·(m + n) numbers instead of 2·m·n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.errors import SkimpError
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.core.workspace import declare_workspace
from skimp.optim.adafactor import factored_spec
from skimp.optim.base import UpdateRule
from skimp.optim.elementwise import wide_dtype
from skimp.optim.factored import (
    average_chunk_,
    average_columns_,
    average_squares_,
    divide_by_root_,
    limit_,
    mean_row_,
)
from skimp.optim.options import check_dtype, check_options, check_range, lr_of
from skimp.optim.rowwise import Rows, sheet
from skimp.optim.state import Spec

#: Added to g² and to the squared disagreement.
EPS = (1e-30, 1e-16)


class CAME(UpdateRule):
    """CAME. State of a matrix: m shaped like it, rows and columns of g² and of the instability; of a vector m and v.

    Args:
        params: parameters, groups or `named_parameters()`; float32, float64, or bf16 with stochastic rounding.
        betas: (β₁, β₂, β₃). clip: the largest root mean square of u.

    Raises:
        SkimpError: an option out of range, a dtype it cannot step, or a sharded parameter.
    """

    rule: ClassVar[str] = "came"
    locality = "matrix"

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        clip: float = 1.0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        if len(betas) != 3 or not all(0 <= b < 1 for b in betas):
            raise SkimpError(f"{self.rule}: betas three numbers in [0, 1)", repr(betas))
        check_options(self.rule, lr, betas[:2], 1.0, weight_decay, eps_min=0.0)
        check_range(self.rule, clip=(clip, 1e-12, float("inf")))
        super().__init__(params, {"lr": lr, "betas": betas, "clip": clip, "weight_decay": weight_decay, "seed": seed})

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        check_dtype(self.rule, name, p)

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        instability = factored_spec(shape, dtype, "_unsure") if len(shape) > 1 else {}
        return {"m": (tuple(shape), wide_dtype(dtype)), **factored_spec(shape, dtype), **instability}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        check_dtype(self.rule, part.name, grad)
        scalars = [*group["betas"], group["clip"], lr_of(group), group["weight_decay"]]
        keys = ("m", "v", "rows", "columns", "rows_unsure", "columns_unsure")
        held = [state[key] for key in keys if key in state]
        came(p, grad, held, scalars, key64(group["seed"], part.address), state["step"])


@torch.library.custom_op(
    "skimp::came",
    mutates_args=("p", "states"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!)[] states, float[] scalars, int key, int step) -> ()",
)
def came(p: Tensor, g: Tensor, states: list[Tensor], scalars: list[float], key: int, step: int) -> None:
    """One step in place; `states`: m and v, or m, rows, columns and those of the instability."""
    beta1, beta2, beta3, clip, lr, weight_decay = scalars
    if p.numel() == 0:
        return
    matrix = p.ndim > 1
    m, rows = states[0].view(sheet(tuple(p.shape))), states[1].view(-1)
    columns, rows3, columns3 = states[2:] if matrix else (None, rows, None)
    work = Rows(p, g, key)
    average_squares_(work, rows, columns, beta2, EPS[0])
    mean_row_(work, rows)
    factor = limit_(work, rows, columns, clip)
    work.column.zero_()
    for here in work.chunks():
        u, w, _, _ = work.read(here)
        divide_by_root_(u, work, here, rows, columns).mul_(factor)
        m[here].mul_(beta1).add_(u, alpha=1.0 - beta1)
        if matrix:
            torch.sub(u, m[here], out=w)
            average_chunk_(work, here, w.mul_(w).add_(EPS[1]), rows3, beta3)
    average_columns_(work, columns3, beta3)
    mean_row_(work, rows3)
    for here in work.chunks():
        u, _, _, _ = work.read(here)
        u.copy_(m[here])
        if matrix:
            divide_by_root_(u, work, here, rows3, columns3)
        work.write(here, u.mul_(lr), 1.0 - lr * weight_decay, step)


@came.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::came")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return Rows.nbytes(args[0]) + 12 if args[0].numel() else 0
