"""The operator `skimp::adamw8bit`: one AdamW step with block-wise 8-bit moments.

For each block of 256: decode both moments, step in float32, encode them with new block maxima. The native
form does this in stack buffers of one block and allocates nothing; the reference does it in chunks with
preallocated scratch of 62 bytes (46 for a float32 weight) × 2**16 = 4.1 MB, and gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.codecs.dynamic8_chunks import BLOCK, Scratch, Tables, decode_chunk, encode_chunk, padded
from skimp.core.forms import native_form
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.kernels.native.library import load
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK, Buffers, adamw_chunk_, adamw_scalars

load()


@torch.library.custom_op(
    "skimp::adamw8bit",
    mutates_args=("p", "m", "m_absmax", "v", "v_absmax"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) m_absmax, Tensor(d!) v, Tensor(e!) v_absmax, "
    "float lr, float beta1, float beta2, float eps, float weight_decay, int step, int key, int offset=0) -> ()",
)
def adamw8bit(
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
        m, v: uint8 codes shaped like `p`, signed and unsigned map; m_absmax, v_absmax: float32 (⌈n/256⌉,).
    """
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)
    form = native_form("adamw8bit", p.device)
    if form is not None:
        form(p, g, m, m_absmax, v, v_absmax, scalars, key, step, offset)
        return
    total, rounded = p.numel(), p.dtype == torch.bfloat16
    chunk = min(CHUNK, padded(total))
    b = Buffers(chunk, p.device)
    coder = Scratch(chunk, p.device)
    noise = Noise(chunk, key, p.device, offset) if rounded else None
    signed, unsigned = Tables(True, p.device), Tables(False, p.device)
    flat_p, flat_g, flat_m, flat_v = p.view(-1), g.view(-1), m.view(-1), v.view(-1)
    for start in range(0, total, CHUNK):
        here = slice(start, min(start + CHUNK, total))
        n = here.stop - start
        size = padded(n)
        maxima = slice(start // BLOCK, start // BLOCK + size // BLOCK)
        b.p[:n].copy_(flat_p[here])
        b.g[:n].copy_(flat_g[here])
        b.p[n:size].fill_(0.0)
        b.g[n:size].fill_(0.0)
        decode_chunk(flat_m[here], m_absmax[maxima], b.m[:size], signed, coder)
        decode_chunk(flat_v[here], v_absmax[maxima], b.v[:size], unsigned, coder)
        adamw_chunk_(b, size, scalars)
        encode_chunk(b.m[:size], flat_m[here], m_absmax[maxima], signed, True, coder)
        encode_chunk(b.v[:size], flat_v[here], v_absmax[maxima], unsigned, True, coder)
        if noise is not None:
            noise.draw(2 * step, start)
            round_bits_(b.p[:n], noise.high(n))
        flat_p[here].copy_(b.p[:n])


@adamw8bit.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::adamw8bit")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p = args[0]
    if p.numel() == 0 or native_form("adamw8bit", p.device) is not None:
        return 0
    chunk = min(CHUNK, padded(p.numel()))
    noise = Noise.nbytes(chunk, args[13] if len(args) > 13 else 0) if p.dtype == torch.bfloat16 else 0
    return Buffers.nbytes(chunk) + Scratch.nbytes(chunk) + noise + 2 * Tables.nbytes(p.device) + CAST_SCALAR_BYTES
