"""The rows that every form of every kernel is held to: odd shapes, all options, made from fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from skimp.kernels.forms import kernel

#: A few float32 ulp (6e-8 each) of sums over up to a few hundred terms, relative to the largest value.
CLOSE = 2e-6


@dataclass(frozen=True)
class Case:
    """One row: a kernel, how its tensors are made, its options.

    Attributes:
        constants: places of floating tensors that get no gradient (angles, token weights given by keyword are none).
        halves: it takes bfloat16 too.
        kept: what a gradient of halves is off by because what it is made from was kept rounded, relative to the
            largest upstream number: half an ulp of p times dy, and of the sum of p dy, for softmax.
    """

    name: str
    shape: tuple[int, ...]
    draw: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    halves: bool = True
    kept: float = 0.0

    @property
    def quick(self) -> bool:
        """Few enough rows for an interpreter, which runs a row's program line by line in Python."""
        return prod(self.shape[:-1]) <= 45 and prod(self.shape) <= 1000

    def make(self, dtype: torch.dtype) -> list[Tensor]:
        tensors = self.draw(self.shape, torch.Generator().manual_seed(0))
        return [t.to(dtype) if t.is_floating_point() else t for t in tensors]

    def differentiates(self, tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
        return not any(tensors[i] is tensor for i in self.constants)

    def __str__(self) -> str:
        words = ",".join(f"{k}={v if not torch.is_tensor(v) else '…'}" for k, v in self.options.items())
        return f"{self.name}-{'x'.join(map(str, self.shape))}-{words}"


def _norm(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=g) * 3, torch.rand(shape[-1], generator=g) + 0.5]


def _layer(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    return [*_norm(shape, g), torch.randn(shape[-1], generator=g)]


def _one(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=g) * 4]


def _pair(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=g) * 4, torch.randn(shape, generator=g)]


def _heads(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    rows, heads, seq, dim = shape
    angles = torch.randn((1, seq, dim // 2), generator=g).repeat(1, 1, 2)
    return [torch.randn((rows, heads, seq, dim), generator=g), angles.cos(), angles.sin()]


def _logits(shape: tuple[int, ...], g: torch.Generator) -> list[Tensor]:
    labels = torch.randint(shape[1], (shape[0],), generator=g)
    labels[1::3] = -100
    return [torch.randn(shape, generator=g) * 5, labels]


_WEIGHTS = torch.tensor([0.0, 1.0, 2.5, 0.25, 3.0])

CASES = [
    *[Case("rms_norm", s, _norm, {"eps": 1e-5}) for s in ((2, 3, 17), (5, 123, 37), (1, 257, 576))],
    *[Case("layer_norm", s, _layer, {"eps": 1e-5}) for s in ((2, 3, 17), (5, 23, 37), (1, 257, 576), (4, 1, 5))],
    *[Case("swiglu", s, _pair) for s in ((3, 85), (2, 129, 301))],
    *[Case("geglu", s, _pair, {"by_tanh": t}) for s in ((3, 85), (2, 129, 31)) for t in (False, True)],
    *[Case("gelu", s, _one, {"by_tanh": t}) for s in ((1,), (3, 85), (2, 129, 31)) for t in (False, True)],
    *[Case("rotary", s, _heads, constants=(1, 2), halves=False) for s in ((2, 3, 7, 10), (1, 2, 33, 16))],
    *[
        Case("softmax", s, _one, {"softcap": c}, kept=2.0**-8)
        for s in ((3, 1), (5, 7, 37), (2, 1000))
        for c in (None, 3.0)
    ],
    *[Case("cross_entropy", s, _logits) for s in ((1, 3), (7, 37), (13, 1001))],
    Case("cross_entropy", (7, 37), _logits, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    Case("cross_entropy", (7, 37), _logits, {"softcap": 4.0, "label_smoothing": 0.2, "z_loss": 1e-2}),
    Case("cross_entropy", (5, 131), _logits, {"weights": _WEIGHTS, "softcap": 30.0}),
    *[Case("log_probs", (7, 131), _logits, {"softcap": c}) for c in (None, 5.0)],
]


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference relative to the largest number."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def compare(case: Case, form: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """`form` against the float64 reference of the same inputs: the value, and the gradient of every input."""
    given = case.make(dtype)
    leaves = [t.to(device).requires_grad_(t.is_floating_point()) for t in given]
    plain = [t.double().requires_grad_() if t.is_floating_point() else t for t in given]
    options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.options.items()}
    y = kernel(case.name, form)(*leaves, **options)
    z = kernel(case.name, "reference")(*plain, **case.options)
    upstream = torch.randn(z.shape, generator=torch.Generator().manual_seed(1))
    wanted = [i for i, t in enumerate(leaves) if t.requires_grad and i not in case.constants]
    found = torch.autograd.grad(y, [leaves[i] for i in wanted], upstream.to(device, y.dtype))
    right = torch.autograd.grad(z, [plain[i] for i in wanted], upstream.to(y.dtype).double())
    for is_gradient, (one, other) in enumerate(zip((y, *found), (z, *right), strict=True)):
        one, other = one.detach().cpu().double(), other.detach()
        if dtype == torch.float32:
            # A gradient that vanishes in exact arithmetic is rounding of what it is a difference of.
            assert (one - other).abs().max() < CLOSE * max(float(other.abs().max()), 0.1), gap(one, other)
        else:
            near = 2.0**-7 * other.abs() + 2.0**-8 * other.abs().max()
            near += case.kept * upstream.abs().max() if is_gradient else 0.0
            assert bool(((one - other).abs() <= near).all()), gap(one, other)
