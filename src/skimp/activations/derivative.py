"""Activations and gated products that keep for backward what their gradient needs, in 4 bits a number.

Values are exact to the bit: the forward is the caller's own. Gradients are approximate, each by what its codes lose:

    y = f(x)        dx = dy f'(x)                      f' in 4 bits, 0.5 bytes a number; ReLU one bit, exact
    y = f(a) c      da = dy c f'(a), dc = dy f(a)      f' in 4 bits, c and f(a) in blocks: 0.5 + 2 (0.5 + 4/64) = 1.63
    y = w xh + b    dx = s (u - [mean u] - xh mean(u xh)), u = dy w, s = 1 / deviation; b's gradient is the sum of dy
                                                       xh in blocks 0.56, s 4 a row; w is frozen
    p = softmax(x)  dx = p (dy - sum dy p)             p over its row's largest on 15 powers of 2 and 0: 0.5 + 4 a row

against 4 (2 in bfloat16) for each of x, a, c, f(a), and twice that for a norm. It pays where nothing else keeps the
tensor: what a trained linear layer reads, it keeps.

Nothing is differentiated twice: torch says so by name.

Source: "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", Jin et al., 2025,
arXiv 2503.08154. Of the paper only abstracts were at hand: that derivatives are kept in 4 bits is theirs; tables,
blocks and what stands for a norm or a product are worked out here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from skimp.activations import derivative_fused as fused
from skimp.activations.derivative_codes import (
    code_blocks,
    code_bytes,
    code_derivative,
    is_native,
    pack,
    pack_bits,
    pieces,
    times_derivative,
    unpack_bits,
    value_of_blocks,
)
from skimp.activations.derivative_tables import Grid, cells
from skimp.core import noise
from skimp.core.errors import SkimpError
from skimp.core.position import position

Plain = Callable[..., Tensor]


@dataclass(frozen=True)
class Coding:
    """How what is kept is coded.

    Attributes:
        bits: 4, or 16 for no code at all: the derivative, or the normalised input, as it is.
        grid: "lloyd" levels with 0 and 1 among them, or "uniform" steps.
        rounding: "nearest", or "stochastic": f' becomes one of the two levels beside it with a mean that is f'.
        seed, name: address of the draws of stochastic rounding.
    """

    bits: Literal[4, 16] = 4
    grid: Grid = "lloyd"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    name: str = ""


PLAIN: dict[str, Plain] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def slope_of(x: Tensor, kind: str) -> Tensor:
    """f'(x) like x, by autograd's own rule of the torch function."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(PLAIN[kind](leaf).sum(), leaf)
    return slope


# ---- y = f(x)


def pointwise(x: Tensor, kind: str, coding: Coding | None = None, plain: Plain | None = None) -> Tensor:
    """f(x), keeping only a coded f'(x).

    Args:
        x: any shape, float. kind: "gelu", "gelu_tanh", "silu" or "relu".
        plain: the forward, where it is another spelling of the same function; torch's by default.

    Raises:
        SkimpError: another activation.
    """
    if kind not in PLAIN:
        raise SkimpError(f"an activation '{kind}' with a coded derivative", "no such one", instead=", ".join(PLAIN))
    y: Tensor = _Pointwise.apply(x, kind, coding or Coding(), plain or PLAIN[kind])  # type: ignore[no-untyped-call]
    return y


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, coding: Coding, plain: Plain) -> Tensor:
        ctx.kind, ctx.coding, ctx.count = kind, coding, x.numel()
        if kind == "relu":
            ctx.save_for_backward(pack_bits((x > 0).reshape(-1)))
        elif coding.bits == 16:
            ctx.save_for_backward(slope_of(x, kind))
        else:
            ctx.save_for_backward(slope_codes(wide(x), kind, coding))
        return plain(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        if ctx.kind == "relu":
            return dy * unpack_bits(kept, ctx.count).view(dy.shape).to(dy.dtype), None, None, None
        if ctx.coding.bits == 16:
            return dy * kept, None, None, None
        table = cells(ctx.kind, ctx.coding.grid)
        return times_derivative(wide(dy.contiguous()), kept, table).to(dy.dtype), None, None, None


def wide(x: Tensor) -> Tensor:
    """float32 for what is narrower."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def slope_codes(x: Tensor, kind: str, coding: Coding) -> Tensor:
    """Codes of f'(x): the nearest level's, or at random one of the two beside it.

    Raises:
        SkimpError: stochastic rounding outside a declared position: every step would draw the same.
    """
    table = cells(kind, coding.grid)
    if coding.rounding == "nearest":
        return code_derivative(x.contiguous(), table)
    here = position()
    if here is None:
        raise SkimpError(
            f"stochastic rounding of derivatives in {coding.name or kind}",
            "a training forward whose place in the run was not declared",
            "draws are addressed by step and row; without them every step would draw the same",
            ["with skimp.core.position.declared_position(step, first_row): loss = model(...)", "rounding: nearest"],
        )
    flat = x.reshape(-1)
    first = here.row * (x.numel() // max(1, x.shape[0]))
    levels = torch.tensor(table.levels, dtype=torch.float32, device=x.device)
    codes = torch.empty(code_bytes(flat.numel()), dtype=torch.uint8, device=x.device)
    for start, stop in pieces(flat.numel()):
        slope = slope_of(flat[start:stop].float(), kind).clamp_(table.levels[0], table.levels[-1])
        below = torch.bucketize(slope, levels[1:-1], right=True)
        way = (slope - levels[below]) / (levels[below + 1] - levels[below])
        name = f"{coding.name}.derivative"
        u = noise.uniform(coding.seed, name, first + start, stop - start, stream=here.step, device=x.device)
        codes[start // 2 : code_bytes(stop)].copy_(pack(below + (u < way).long()))
    return codes


# ---- y = f(a) c


def gated(a: Tensor, c: Tensor, kind: str, coding: Coding | None = None, plain: Plain | None = None) -> Tensor:
    """f(a) c, both of one shape, keeping f'(a), c and f(a) coded; `plain(a, c)` is the forward.

    Raises:
        SkimpError: another activation.
    """
    if kind not in PLAIN or kind == "relu":
        raise SkimpError(f"a product gated by '{kind}' with a coded derivative", "no table", instead="silu, gelu_tanh")
    y: Tensor = _Gated.apply(a, c, kind, coding or Coding(), plain)  # type: ignore[no-untyped-call]
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor, kind: str, coding: Coding, plain: Plain | None) -> Tensor:
        ctx.kind, ctx.coding = kind, coding
        if coding.bits == 16:
            ctx.save_for_backward(slope_of(a, kind), c, PLAIN[kind](a))
        elif coding.rounding == "nearest" and kind != "gelu" and is_native(wide(a), wide(c)):
            ctx.save_for_backward(*fused.gated_code(wide(a), wide(c), kind, coding.grid))
        else:
            rows = code_blocks(c.reshape(-1, c.shape[-1]))
            value = code_blocks(PLAIN[kind](wide(a)).reshape(-1, c.shape[-1]))
            ctx.save_for_backward(slope_codes(wide(a), kind, coding), *rows, *value)
        return PLAIN[kind](a) * c if plain is None else plain(a, c)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept, kind, coding = ctx.saved_tensors, ctx.kind, ctx.coding
        if coding.bits == 16:
            slope, c, value = kept
            return dy * c * slope, dy * value, None, None, None
        g = wide(dy.contiguous())
        if coding.rounding == "nearest" and kind != "gelu" and is_native(g):
            da, dc = fused.gated_back(g, *kept, kind, coding.grid)
        else:
            slopes, c_codes, c_most, f_codes, f_most = kept
            c = value_of_blocks(c_codes, c_most, g.shape[-1]).view(g.shape)
            da = times_derivative((g * c).to(g.dtype), slopes, cells(kind, coding.grid))
            dc = g * value_of_blocks(f_codes, f_most, g.shape[-1]).view(g.shape)
        return da.to(dy.dtype), dc.to(dy.dtype), None, None, None
