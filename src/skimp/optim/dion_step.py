"""The operator `skimp::dion`: momentum, one power iteration, error feedback and the move of one matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from skimp.core.cholesky_qr import orthonormal_bytes, orthonormal_columns
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK
from skimp.optim.elementwise import wide_dtype
from skimp.optim.muon_step import round_weights_
from skimp.optim.rowwise import sheet

#: A column of R this much shorter than the longest is rounding noise.
DEAD = 1e-6


def dion(part: Part, p: Tensor, g: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], lr: float) -> None:
    """One step in place; `state` has m and q."""
    rows, columns = sheet(tuple(p.shape))
    # A projection that stores outputs as columns has its sides the other way about.
    outputs, inputs = (columns, rows) if group["columns"] else (rows, columns)
    scalars = [group["momentum"], lr * math.sqrt(outputs / inputs), 1.0 - lr * group["weight_decay"]]
    _dion(p, g, state["m"], state["q"], scalars, key64(group["seed"], part.address), state["step"])


@torch.library.custom_op(
    "skimp::dion",
    mutates_args=("p", "m", "q"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) q, float[] scalars, int key, int step) -> ()",
)
def _dion(p: Tensor, g: Tensor, m: Tensor, q: Tensor, scalars: list[float], key: int, step: int) -> None:
    if p.numel() == 0:
        return
    momentum, size, decay = scalars
    shape, wide = sheet(tuple(p.shape)), wide_dtype(p.dtype)
    m = m.view(shape)
    move = torch.empty(shape, dtype=wide, device=p.device)
    m.add_(move.copy_(g.view(shape)).nan_to_num_(0.0, 0.0, 0.0))
    basis = _basis(m, q)
    _feed_back(m, q, basis, momentum, move)
    del basis
    held = torch.empty(shape, dtype=wide, device=p.device).copy_(p.view(shape))
    held.mul_(decay).sub_(move, alpha=size)
    if p.dtype == torch.bfloat16:
        round_weights_(held.view(-1), Noise(min(CHUNK, p.numel()), key, p.device), step)
    p.view(shape).copy_(held)


def _basis(m: Tensor, q: Tensor) -> Tensor:
    """The orthonormal columns of M·Q, in the dtype of the arithmetic."""
    return orthonormal_columns(torch.mm(m, q).double()).to(m.dtype)


def _feed_back(m: Tensor, q: Tensor, basis: Tensor, momentum: float, move: Tensor) -> None:
    """R, the new momentum and the new Q; `move` becomes P·Qᵀ."""
    r = torch.mm(m.mT, basis)
    m.addmm_(basis, r.mT, alpha=-(1.0 - momentum))
    length = torch.linalg.vector_norm(r, dim=0)
    alive = torch.gt(length, length.amax().mul_(DEAD)).to(m.dtype)
    r.div_(length.clamp_(min=torch.finfo(m.dtype).tiny)).mul_(alive)
    q.mul_(alive.neg().add_(1.0)).add_(r)
    torch.mm(basis, r.mT, out=move)


@_dion.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::dion")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p, q = args[0], args[3]
    if p.numel() == 0:
        return 0
    rows, columns = sheet(tuple(p.shape))
    rank, wide = q.shape[1], wide_dtype(p.dtype).itemsize
    noise = Noise.nbytes(min(CHUNK, p.numel())) if p.dtype == torch.bfloat16 else 0
    turned = wide * rank * rows
    first = 8 * rows * rank + (turned if wide < 8 else 0)
    second = orthonormal_bytes(rows, rank)
    third = turned + wide * (columns * rank + 3 * rank) + 12
    last = wide * rows * columns + noise + CAST_SCALAR_BYTES
    return int(wide * rows * columns + max(first, second, third, last))
