"""The operator `skimp::muon`: momentum, orthogonalisation and the move of a stack of matrices of one shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.codecs.bf16 import round_bits_
from skimp.core.newton_schulz import NewtonSchulz
from skimp.core.noise import key64
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK
from skimp.optim.elementwise import wide_dtype

#: Numbers of a stack: 8 MiB of float32 in each buffer. Stacking pays for small matrices; large ones fill a CPU alone.
STACK = 2**21


def stack_at_once(p: Tensor) -> int:
    """How many parameters like `p` make one stack."""
    return max(1, STACK // max(1, p.numel()))


def parts_of(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[int, bool]:
    """(equal parts a matrix is orthogonalised in, whether they are runs of columns): three for a fused projection."""
    columns = bool(group["columns"])
    across = shape[-1] if columns else shape[-2]
    split = group["role"] == "qkv" and len(shape) == 2 and across == 3 * (shape[-2] if columns else shape[-1])
    return (3, columns) if split else (1, columns)


def muon(
    ps: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    steps: list[int],
    names: list[str],
    group: Mapping[str, Any],
    lr: float,
) -> None:
    """One step in place. All of one shape, dtype and group; contiguous.

    `steps` and `names` address the rounding noise of bfloat16 weights, the group's options say the rest.
    """
    parts, columns = parts_of(ps[0].shape, group)
    rows, width = ps[0].shape[-2:]
    rows, width = (rows, width // parts) if columns else (rows // parts, width)
    # A projection that stores outputs as columns has its sides the other way about.
    outputs, inputs = (width, rows) if columns else (rows, width)
    long = 0.2 * math.sqrt(max(rows, width)) if group["scale"] == "match-rms" else math.sqrt(max(1, outputs / inputs))
    scalars = [group["momentum"], float(group["nesterov"]), lr * long, 1.0 - lr * group["weight_decay"]]
    keys = [key64(group["seed"], name) for name in names]
    _muon(ps, grads, moments, scalars, parts, columns, group["ns_steps"], keys, steps)


def _stack(shape: Sequence[int], parts: int, columns: bool) -> tuple[int, int, int]:
    """(matrices of one parameter, rows, columns of each)."""
    rows, width = shape[-2:]
    each = count(tuple(shape)[:-2]) * parts
    return (each, rows, width // parts) if columns else (each, rows // parts, width)


@torch.library.custom_op(
    "skimp::muon",
    mutates_args=("ps", "moments"),
    schema="(Tensor(a!)[] ps, Tensor[] grads, Tensor(b!)[] moments, float[] scalars, int parts, bool columns, "
    "int ns_steps, int[] keys, int[] steps) -> ()",
)
def _muon(
    ps: list[Tensor],
    grads: list[Tensor],
    moments: list[Tensor],
    scalars: list[float],
    parts: int,
    columns: bool,
    ns_steps: int,
    keys: list[int],
    steps: list[int],
) -> None:
    if ps[0].numel() == 0:
        return
    momentum, nesterov, size, decay = scalars
    shape, wide, device = ps[0].shape, wide_dtype(ps[0].dtype), ps[0].device
    each, rows, width = _stack(shape, parts, columns)
    u = torch.empty(shape, dtype=wide, device=device)
    matrices = u.view(-1, *shape[-2:])
    # One view per matrix of u: cut by columns, by rows, or by the dimensions before the last two.
    views = [v for one in matrices for v in one.chunk(parts, dim=1 if columns else 0)]
    work = NewtonSchulz(each * len(ps), rows, width, wide, device)
    for i, (grad, m) in enumerate(zip(grads, moments, strict=True)):
        u.copy_(grad).nan_to_num_(0.0, 0.0, 0.0)
        m.mul_(momentum).add_(u)
        if nesterov:
            u.add_(m, alpha=momentum)
        else:
            u.copy_(m)
        for j, view in enumerate(views):
            work.slot(i * each + j).copy_(view)
    work.run(each * len(ps), ns_steps)
    noise = Noise(min(CHUNK, u.numel()), 0, device) if ps[0].dtype == torch.bfloat16 else None
    moved = work.y.view(-1)[: u.numel()].view(shape)
    for i, p in enumerate(ps):
        for j, view in enumerate(views):
            view.copy_(work.slot(i * each + j))
        moved.copy_(p).mul_(decay).sub_(u, alpha=size)
        if noise is not None:
            noise.key = keys[i]
            round_weights_(moved.view(-1), noise, steps[i])
        p.copy_(moved)


def round_weights_(flat: Tensor, noise: Noise, step: int) -> None:
    """Round float32 weights in place to multiples of the bfloat16 step with stream 2·step of the noise."""
    for start in range(0, flat.numel(), CHUNK):
        n = min(CHUNK, flat.numel() - start)
        noise.draw(2 * step, start)
        round_bits_(flat[start : start + n], noise.high(n))


@_muon.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::muon")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    ps, parts, columns = args[0], args[4], args[5]
    p = ps[0]
    if p.numel() == 0:
        return 0
    each, rows, width = _stack(p.shape, parts, columns)
    wide = wide_dtype(p.dtype).itemsize
    noise = Noise.nbytes(min(CHUNK, p.numel())) if p.dtype == torch.bfloat16 else 0
    scratch = NewtonSchulz.nbytes(each * len(ps), rows, width, wide)
    # torch copies a transposed matrix into a contiguous one through a buffer of 60 x 60, unless it is small.
    turned = rows > width and rows * width >= 3600 and (parts == 1 or not columns)
    inside = 3600 * wide if turned else CAST_SCALAR_BYTES
    return int(p.numel() * wide + scratch + noise + inside)
