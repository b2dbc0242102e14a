"""The operator `skimp::adamw4bit`: one AdamW step with block-wise 4-bit moments.

For each block of 128: decode both moments, step in float32, encode them with new maxima. The native form does this on
the stack; the reference in chunks with preallocated scratch, and gives the same bits. The first moment is rounded at
random with the lower halves of noise stream 2·step, a bfloat16 weight with the upper halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.codecs.block4_chunks import Ladder4, decode4_chunk, encode4_chunk, padded4
from skimp.core.codecs.block4_map import BLOCK4
from skimp.core.codecs.dynamic8_chunks import Scratch
from skimp.core.forms import native_form
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.kernels.native.four_bit import load
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK, Buffers, adamw_chunk_, adamw_scalars

load()


@torch.library.custom_op(
    "skimp::adamw4bit",
    mutates_args=("p", "m", "m_absmax", "v", "v_absmax"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) m_absmax, Tensor(d!) v, Tensor(e!) v_absmax, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, int key, int offset=0) -> ()",
)
def adamw4bit(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    m_absmax: Tensor,
    v: Tensor,
    v_absmax: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    key: int,
    offset: int = 0,
) -> None:
    """One step in place, all tensors contiguous.

    Args:
        p: float32, or bf16 which is rounded stochastically with noise (key, stream 2·step, offset + element).
        g: float32 or bf16, shaped like `p`.
        m, v: uint8 (64 · ⌈n/128⌉,), signed and unsigned map; m_absmax, v_absmax: float32 (⌈n/128⌉,).
    """
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)
    form = native_form("adamw4bit", p.device)
    if form is not None:
        form(p, g, m, m_absmax, v, v_absmax, scalars, key, step, offset)
        return
    total, rounded = p.numel(), p.dtype == torch.bfloat16
    chunk = min(CHUNK, padded4(total))
    b, coder, table = Buffers(chunk, p.device), Scratch(chunk, p.device), Ladder4(p.device)
    noise = Noise(chunk, key, p.device, offset)
    flat_p, flat_g = p.view(-1), g.view(-1)
    for start in range(0, total, CHUNK):
        here = slice(start, min(start + CHUNK, total))
        n = here.stop - start
        size = padded4(n)
        maxima = slice(start // BLOCK4, (start + size) // BLOCK4)
        bytes_ = slice(start // 2, (start + size) // 2)
        b.p[:n].copy_(flat_p[here])
        b.g[:n].copy_(flat_g[here])
        decode4_chunk(m[bytes_], m_absmax[maxima], b.m[:size], table, coder)
        decode4_chunk(v[bytes_], v_absmax[maxima], b.v[:size], None, coder)
        for buffer in (b.p, b.g, b.m, b.v):
            buffer[n:size].fill_(0.0)
        adamw_chunk_(b, size, scalars)
        noise.draw(2 * step, start)
        encode4_chunk(b.m[:size], m[bytes_], m_absmax[maxima], table, coder, noise.low(size))
        encode4_chunk(b.v[:size], v[bytes_], v_absmax[maxima], None, coder)
        if rounded:
            round_bits_(b.p[:n], noise.high(n))
        flat_p[here].copy_(b.p[:n])


@adamw4bit.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::adamw4bit")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p = args[0]
    if p.numel() == 0 or native_form("adamw4bit", p.device) is not None:
        return 0
    chunk = min(CHUNK, padded4(p.numel()))
    noise = Noise.nbytes(chunk, args[13] if len(args) > 13 else 0)
    return Buffers.nbytes(chunk) + Scratch.nbytes(chunk) + noise + Ladder4.nbytes(p.device) + CAST_SCALAR_BYTES
