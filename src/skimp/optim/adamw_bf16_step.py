"""The operator `skimp::adamw_bf16`: one AdamW step on a bf16 weight, computed in float32, rounded
stochastically.

One operator per parameter, so that simulating a model costs one fake call each and scratch is bounded
whatever the size. The native form takes no heap at all; the reference works in chunks with preallocated
scratch and gives the same bits. Noise of step t: stream 2t has the weight's 16 bits in its upper halves and
the first moment's in its lower halves; stream 2t + 1 has the second moment's in its upper halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.forms import native_form
from skimp.core.noise import fill_words_
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.kernels.native.library import load
from skimp.optim.adamw_math import CHUNK, Buffers, adamw_chunk_, adamw_scalars

load()


class Noise:
    """16-bit noise for chunks of at most `size` elements: 16 bytes per element of scratch.

    `offset` is where the tensor's first number stands in the whole parameter. The four words of a block are made plane
    by plane, each a run of neighbours, and put in their order where a half of them is taken: twice as fast as in order.
    """

    def __init__(self, size: int, key: int, device: torch.device, offset: int = 0) -> None:
        blocks = (offset % 4 + size + 3) // 4
        self.key = key
        self.offset = offset
        self.words = torch.empty(4, blocks, dtype=torch.int64, device=device).t()
        self.scratch = torch.empty(2, blocks, dtype=torch.int64, device=device)
        self.noise = torch.empty(blocks, 4, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(size: int, offset: int = 0) -> int:
        return 64 * ((offset % 4 + size + 3) // 4)

    def draw(self, stream: int, start: int) -> None:
        """Draw the numbers from `start` (a multiple of 4) of a stream."""
        fill_words_(self.words, self.scratch, self.key, stream, (self.offset + start) // 4)

    def low(self, n: int) -> Tensor:
        """The lower halves of the first n numbers drawn, (n,) int32, until the next call."""
        self.noise.copy_(self.words).bitwise_and_(0xFFFF)
        return self._first(n)

    def high(self, n: int) -> Tensor:
        """The upper halves."""
        self.noise.copy_(self.words).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
        return self._first(n)

    def _first(self, n: int) -> Tensor:
        head = self.offset % 4
        return self.noise.view(-1)[head : head + n]


@torch.library.custom_op(
    "skimp::adamw_bf16",
    mutates_args=("p", "m", "v"),
    schema="(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, int step, int key, int offset=0) -> ()",
)
def adamw_bf16(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    key: int,
    offset: int = 0,
) -> None:
    """One step in place: `p` bf16, `g` bf16 or float32, `m` and `v` both bf16 or both float32.

    `offset`: the place of the first number in the whole parameter, which addresses its noise.
    """
    scalars = adamw_scalars(lr, beta1, beta2, eps, weight_decay, step)
    form = native_form("adamw_bf16", p.device)
    if form is not None:
        form(p, g, m, v, scalars, key, step, offset)
        return
    total = p.numel()
    size = min(CHUNK, total)
    b = Buffers(size, p.device)
    noise = Noise(size, key, p.device, offset)
    flat_p, flat_g, flat_m, flat_v = p.view(-1), g.view(-1), m.view(-1), v.view(-1)
    for start in range(0, total, CHUNK):
        here = slice(start, min(start + CHUNK, total))
        n = here.stop - start
        b.p[:n].copy_(flat_p[here])
        b.g[:n].copy_(flat_g[here])
        b.m[:n].copy_(flat_m[here])
        b.v[:n].copy_(flat_v[here])
        adamw_chunk_(b, n, scalars)
        noise.draw(2 * step, start)
        if m.dtype == torch.bfloat16:
            round_bits_(b.m[:n], noise.low(n))
        round_bits_(b.p[:n], noise.high(n))
        if v.dtype == torch.bfloat16:
            noise.draw(2 * step + 1, start)
            round_bits_(b.v[:n], noise.high(n))
        flat_p[here].copy_(b.p[:n])
        flat_m[here].copy_(b.m[:n])
        flat_v[here].copy_(b.v[:n])


@adamw_bf16.register_fake
def _fake(*args: Any, **kwargs: Any) -> None:
    return None


@declare_workspace("skimp::adamw_bf16")
def _workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    p = args[0]
    if p.numel() == 0 or native_form("adamw_bf16", p.device) is not None:
        return 0
    size = min(CHUNK, p.numel())
    return Buffers.nbytes(size) + Noise.nbytes(size, args[11] if len(args) > 11 else 0) + CAST_SCALAR_BYTES
