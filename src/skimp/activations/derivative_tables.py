"""The values that 4-bit codes stand for: of an activation's derivative, and of a block over its largest magnitude.

Both are found here by the same rule, Lloyd's: values are the means of their cells and edges are the midpoints of the
values, again and again, which ends where the mean squared error cannot be made smaller by moving one of them. Some
values are pinned. Of a derivative 0 and 1 are: most numbers of a layer lie where the activation is flat or the
identity, and a value beside 0 or 1 would turn every one of them by as much, in one direction, layer after layer. Of a
block -1, 0 and 1.

A derivative's code is found from x and not from f'(x): f' rises on one piece and falls on those beside it, so that the
cells are intervals of x, whose ends are found here once. Coding then needs comparisons only, no exponential.

Source: "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", Jin et al., 2025,
arXiv 2503.08154 (derivatives in 4 bits); "Least Squares Quantization in PCM", Lloyd, 1982.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from skimp.core.errors import SkimpError

Numbers = npt.NDArray[np.float64]
Grid = Literal["lloyd", "uniform"]

#: x beyond which every derivative here is 0 or 1 to float32.
FAR = 12.0
#: Numbers of a block that share a scale.
BLOCK = 64


@dataclass(frozen=True)
class Cells:
    """A coded derivative.

    Attributes:
        levels: value of each code, rising. edges: ends of intervals of x, rising. codes: code of each interval, one
            more than edges. worst: no |f'(x) - value| is larger.
    """

    levels: tuple[float, ...]
    edges: tuple[float, ...]
    codes: tuple[int, ...]
    worst: float


def _normal(x: Numbers) -> Numbers:
    return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _phi(x: Numbers) -> Numbers:
    """The normal distribution function."""
    found: Numbers = 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    return found


def _gelu(x: Numbers) -> Numbers:
    return _phi(x) + x * _normal(x)


def _gelu_tanh(x: Numbers) -> Numbers:
    c = math.sqrt(2.0 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    found: Numbers = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3 * 0.044715 * x * x)
    return found


def _silu(x: Numbers) -> Numbers:
    s = 1.0 / (1.0 + np.exp(-x))
    found: Numbers = s * (1.0 + x * (1.0 - s))
    return found


#: Derivatives by the name of their activation. ReLU needs no table: its derivative is one bit.
DERIVATIVES: dict[str, Callable[[Numbers], Numbers]] = {"gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}


def bounds(kind: str) -> tuple[float, float]:
    """Smallest and largest value of a derivative."""
    y = DERIVATIVES[kind](_grid())
    return float(y.min()), float(y.max())


def _grid() -> Numbers:
    return np.linspace(-FAR, FAR, 48001)


def lloyd(values: Numbers, weights: Numbers, start: Numbers, pinned: tuple[float, ...], rounds: int = 300) -> Numbers:
    """Levels of least mean squared error for weighted values, the nearest of `start` to each pinned value held there.

    Args:
        values: sorted. weights: of each, at least 0. start: levels to begin with, rising.
        pinned: values that are levels exactly.
        rounds: how often levels and edges are moved.

    Returns:
        The levels, rising.

    Raises:
        SkimpError: two pinned values take one level.
    """
    levels = start.astype(np.float64).copy()
    held = [int(np.abs(levels - value).argmin()) for value in pinned]
    if len(set(held)) != len(pinned):
        raise SkimpError(f"{len(start)} levels with {pinned} among them", "two are nearest to one level")
    mass, moment = np.concatenate([[0.0], weights.cumsum()]), np.concatenate([[0.0], (weights * values).cumsum()])
    for _ in range(rounds):
        levels[held] = pinned
        cuts = np.searchsorted(values, _middles(levels))
        ends = np.concatenate([[0], cuts, [len(values)]])
        inside = np.diff(mass[ends])
        means = np.diff(moment[ends]) / np.where(inside > 0, inside, 1.0)
        levels = np.where(inside > 0, means, levels)
    levels[held] = pinned
    return np.sort(levels)


def _middles(levels: Numbers) -> Numbers:
    found: Numbers = (levels[1:] + levels[:-1]) / 2
    return found


@cache
def cells(kind: str, grid: Grid = "lloyd", count: int = 16) -> Cells:
    """The table of an activation's derivative.

    Args:
        kind: "gelu" (erf), "gelu_tanh" or "silu".
        grid: "lloyd" for normal x with 0 and 1 pinned; "uniform" for equal steps from the smallest to the largest
            value.
        count: codes, 16 for 4 bits.

    Raises:
        SkimpError: another activation.
    """
    if kind not in DERIVATIVES:
        raise SkimpError(f"a coded derivative of '{kind}'", "no such table", instead=", ".join(DERIVATIVES))
    derivative, x = DERIVATIVES[kind], _grid()
    y = derivative(x)
    levels = np.linspace(y.min(), y.max(), count)
    if grid == "lloyd":
        order = y.argsort()
        levels = lloyd(y[order], _normal(x)[order], levels, (0.0, 1.0))
    levels = levels.astype(np.float32).astype(np.float64)
    index = np.searchsorted(_middles(levels), y)
    changes = np.flatnonzero(index[1:] != index[:-1])
    edges: list[float] = []
    codes = [int(index[0])]
    for at in changes:
        # Neighbours on the grid differ by one code: the grid is far finer than any cell.
        middle = _middles(levels)[min(index[at], index[at + 1])]
        edges.append(_crossing(derivative, float(x[at]), float(x[at + 1]), float(middle)))
        codes.append(int(index[at + 1]))
    # Within the levels half a gap, and beyond the outer ones the way to the derivative's own ends.
    worst = max(np.diff(levels).max() / 2, levels[0] - y.min(), y.max() - levels[-1])
    return Cells(tuple(map(float, levels)), tuple(edges), tuple(codes), float(worst))


def _crossing(derivative: Callable[[Numbers], Numbers], low: float, high: float, value: float) -> float:
    """Where the derivative passes `value` between two points, as a float32 number."""
    ends = derivative(np.array([low, high]))
    rising = ends[0] < ends[1]
    for _ in range(60):
        middle = (low + high) / 2
        if (derivative(np.array([middle]))[0] < value) == rising:
            low = middle
        else:
            high = middle
    return float(np.float32((low + high) / 2))


@cache
def block_levels(count: int = 16) -> tuple[float, ...]:
    """Levels of u = x / max|x| in blocks of 64 normal numbers, with -1, 0 and 1 among them.

    The density of u: the largest magnitude m has density 64 (2 Phi(m) - 1)^63 2 phi(m), and beside it x is normal
    within [-m, m]. The block's largest itself is 1 or -1 and costs nothing.
    """
    m = np.linspace(0.5, 6.0, 1101)
    inside = 2.0 * _phi(m) - 1.0
    density = BLOCK * inside ** (BLOCK - 1) * 2.0 * _normal(m)
    u = np.linspace(-1.0, 1.0, 8001)
    weights = (_normal(u[:, None] * m[None, :]) * m / inside * density).sum(1)
    levels = lloyd(u, weights, np.linspace(-1.0, 1.0, count), (-1.0, 0.0, 1.0))
    return tuple(map(float, levels.astype(np.float32)))


@cache
def block_edges(count: int = 16) -> tuple[float, ...]:
    """Midpoints between the block's levels."""
    return tuple(map(float, _middles(np.array(block_levels(count))).astype(np.float32)))
