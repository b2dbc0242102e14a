"""Operators of element-wise rules: the arithmetic of a chunk becomes one operator for a parameter of any size.

A rule writes what one step does to a chunk of numbers in float32 (float64 for float64 weights). Around it this module
puts what all of them need: scratch of a fixed size, one operator per parameter (so that simulating costs one fake
call), gradients that are left as they came, elements whose g² is not finite left out, and weights or states in bfloat16
rounded at random with noise addressed by (seed, name, step, place), so that parts of a parameter round as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from skimp.core.codecs.bf16 import round_bits_
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace
from skimp.optim.adamw_bf16_step import Noise
from skimp.optim.adamw_math import CHUNK


class Arithmetic(Protocol):
    """One step of a chunk."""

    def __call__(
        self, p: Tensor, g: Tensor, states: Sequence[Tensor], scratch: Sequence[Tensor], scalars: Sequence[float]
    ) -> None:
        """Update `states` in place and write the new weights to `g`.

        Args:
            p: weights, read only. g: gradient, finite, overwritten. All tensors are (n,) of one dtype.
            scratch: as many buffers as the rule asked for.
        """
        ...


class Elementwise:
    """An operator `skimp::NAME(p, g, states, scalars, key, step, offset)` made of a chunk's arithmetic.

    Args:
        name: of the operator.
        arithmetic: of one chunk; allocates nothing but 0-dim scalars.
        states, scratch: how many tensors of each it takes.
    """

    def __init__(self, name: str, arithmetic: Arithmetic, states: int, scratch: int) -> None:
        self.name, self.arithmetic, self.states, self.scratch = name, arithmetic, states, scratch
        self._operator = torch.library.custom_op(
            f"skimp::{name}",
            self._run,
            mutates_args=("p", "states"),
            schema="(Tensor(a!) p, Tensor g, Tensor(b!)[] states, float[] scalars, int key, int step, "
            "int offset=0) -> ()",
        )
        self._operator.register_fake(lambda *args, **kwargs: None)
        declare_workspace(f"skimp::{name}")(self._workspace)

    def __call__(
        self,
        part: Part,
        p: Tensor,
        g: Tensor,
        states: Sequence[Tensor],
        scalars: Sequence[float],
        step: int,
        seed: int,
    ) -> None:
        """One step in place on the part of a parameter that `p` is; `g` is not changed."""
        self._operator(p, g, list(states), list(scalars), key64(seed, part.address), step, part.offset)

    def _run(
        self,
        p: Tensor,
        g: Tensor,
        states: list[Tensor],
        scalars: list[float],
        key: int,
        step: int,
        offset: int = 0,
    ) -> None:
        total, wide = p.numel(), wide_dtype(p.dtype)
        size = min(CHUNK, total)
        if total == 0:
            return

        def buffer(dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(size, dtype=dtype, device=p.device)

        held = [p, *states]
        copies = [buffer() if t.dtype != wide else None for t in held]
        noise = Noise(size, key, p.device, offset) if any(t.dtype == torch.bfloat16 for t in held) else None
        grad, bad, scratch = buffer(), buffer(torch.bool), [buffer() for _ in range(max(1, self.scratch))]
        flat, flat_g = [t.view(-1) for t in held], g.view(-1)
        for start in range(0, total, CHUNK):
            here = slice(start, min(start + CHUNK, total))
            n = here.stop - start
            grad[:n].copy_(flat_g[here])
            torch.mul(grad[:n], grad[:n], out=scratch[0][:n])
            scratch[0][:n].sub_(scratch[0][:n])  # 0 where finite, NaN elsewhere
            torch.ne(scratch[0][:n], 0.0, out=bad[:n])
            grad[:n].masked_fill_(bad[:n], 0.0)
            now = [t[here] if c is None else c[:n].copy_(t[here]) for t, c in zip(flat, copies, strict=True)]
            self.arithmetic(now[0], grad[:n], now[1:], [s[:n] for s in scratch], scalars)
            torch.where(bad[:n], now[0], grad[:n], out=now[0])
            for state in now[1:]:
                state.masked_fill_(bad[:n], 0.0)
            if noise is not None:
                _round(noise, held, now, step, start, n)
            for target, value, copy in zip(flat, now, copies, strict=True):
                if copy is not None:
                    target[here].copy_(value)

    def _workspace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        p, states = args[0], args[2]
        if p.numel() == 0:
            return 0
        size, wide = min(CHUNK, p.numel()), wide_dtype(p.dtype)
        held = [p, *states]
        buffers = sum(t.dtype != wide for t in held) + 1 + max(1, self.scratch)
        noise = any(t.dtype == torch.bfloat16 for t in held)
        offset = args[6] if len(args) > 6 else 0
        drawn = Noise.nbytes(size, offset) if noise else 0
        return int(size * (buffers * wide.itemsize + 1) + drawn + CAST_SCALAR_BYTES)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype a rule computes in: float64 for float64 weights, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _round(noise: Noise, held: Sequence[Tensor], now: Sequence[Tensor], step: int, start: int, n: int) -> None:
    """Round what is kept in bfloat16. Tensor k takes stream 4·step + k // 2, its lower halves where k is odd."""
    drawn = -1
    for k in sorted(range(len(held)), key=lambda k: (k // 2, -k)):  # low before high, which shifts
        if held[k].dtype == torch.bfloat16:
            if drawn != k // 2:
                drawn = k // 2
                noise.draw(4 * step + drawn, start)
            round_bits_(now[k], noise.low(n) if k % 2 else noise.high(n))
