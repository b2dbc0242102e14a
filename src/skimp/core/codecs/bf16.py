"""bfloat16, 2 bytes per element, rounded to nearest or stochastically.

bfloat16 keeps 8 bits of significand, so near 1.0 its step is 2**-7 = 0.0078 upwards (0.0039 downwards): an
update of 1e-4 rounded to nearest is lost every time. Stochastic rounding goes up with probability (x − below)
/ step, so the mean is right: 100 updates of 1e-4 move the mean of many weights by 0.01. Source: Gupta et al.,
"Deep Learning with Limited Numerical Precision", 2015, arXiv 1502.02551, section 3.

On bits: a float32 is a bf16 followed by 16 bits of remainder. Adding a uniform 16-bit integer carries into
the bf16 with probability remainder / 2**16; cutting the low half off then rounds. The noise is addressed (see
`skimp.core.noise`), so the rounding is the same on every device and after every resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.forms import native_form
from skimp.core.noise import fill_words_, key64
from skimp.core.workspace import CAST_SCALAR_BYTES, declare_workspace

#: Elements per chunk of the reference, whose scratch is 21 bytes per element (see `_round_workspace`).
CHUNK = 2**16


def stochastic_round(x: Tensor, seed: int, name: str, *, stream: int = 0, offset: int = 0) -> Tensor:
    """`x` (any shape, any float dtype) as bf16 (contiguous), element i rounded with noise number offset + i.

    NaN stays NaN and infinities stay; a finite value beyond the largest bf16 (3.39e38) may round to infinity,
    as it does to nearest. bf16 input comes back unchanged.

    Raises:
        SkimpError: `x` is not floating point.
    """
    check_floating("bf16", x)
    return _stochastic_round(x.contiguous(), key64(seed, name), stream, offset)


@torch.library.custom_op(
    "skimp::bf16_stochastic_round",
    mutates_args=(),
    schema="(Tensor x, int key, int stream, int offset) -> Tensor",
)
def _stochastic_round(x: Tensor, key: int, stream: int, offset: int) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    form = native_form("bf16_stochastic_round", x.device)
    if form is not None and x.dtype == torch.float32:
        form(x, out, key, stream, offset)
        return out
    source, target = x.view(-1), out.view(-1)
    size, head = min(CHUNK, x.numel()), offset % 4
    blocks = (size + head + 3) // 4
    values = torch.empty(size, dtype=torch.float32, device=x.device)
    noise = torch.empty(size, dtype=torch.int32, device=x.device)
    nans = torch.empty(size, dtype=torch.bool, device=x.device)
    words = torch.empty(blocks, 4, dtype=torch.int64, device=x.device)
    scratch = torch.empty(2, blocks, dtype=torch.int64, device=x.device)
    for start in range(0, x.numel(), CHUNK):
        n = min(CHUNK, x.numel() - start)
        used = (n + head + 3) // 4  # CHUNK % 4 == 0, so the head is the same in every chunk
        fill_words_(words[:used], scratch[:, :used], key, stream, (offset + start) // 4)
        numbers = words[:used].view(-1)
        values[:n].copy_(source[start : start + n])
        torch.ne(values[:n], values[:n], out=nans[:n])
        noise[:n].copy_(numbers.bitwise_right_shift_(16)[head : head + n])
        round_bits_(values[:n], noise[:n])
        values[:n].masked_fill_(nans[:n], float("nan"))
        target[start : start + n].copy_(values[:n])
    return out


@_stochastic_round.register_fake
def _stochastic_round_fake(x: Tensor, key: int, stream: int, offset: int) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


@declare_workspace("skimp::bf16_stochastic_round")
def _round_workspace(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    x, _, _, offset = args
    if x.numel() == 0 or (x.dtype == torch.float32 and native_form("bf16_stochastic_round", x.device) is not None):
        return 0
    size = min(CHUNK, x.numel())
    blocks = (size + offset % 4 + 3) // 4
    return 9 * size + 48 * blocks + CAST_SCALAR_BYTES


def round_bits_(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 `values` in place to multiples of the bf16 step, given int32 `noise` in [0, 2**16).

    Afterwards the low 16 bits are zero, so that any cast to bf16 is exact. A NaN whose low payload bits are
    set could carry into the sign; the callers replace NaN.
    """
    bits = values.view(torch.int32)
    bits.add_(noise).bitwise_and_(-65536)
    return values


@dataclass(frozen=True)
class BF16:
    """Parts: "values" bf16, shaped like the tensor. Relative error ≤ 2**-8 to nearest, < 2**-7
    stochastically.

    Args:
        stochastic: round with noise instead of to nearest.
        seed, label: the address of the noise; two tensors need two labels.
        stream: which noise of that address; use `at(step)` so that every encoding draws afresh.
    """

    name: ClassVar[str] = "bf16"
    block: ClassVar[int] = 1
    stochastic: bool = False
    seed: int = 0
    label: str = ""
    stream: int = 0

    def at(self, stream: int) -> BF16:
        """The same codec with the noise of `stream`, e.g. of this step."""
        return replace(self, stream=stream)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        check_floating(self.name, x)
        if self.stochastic:
            return {"values": stochastic_round(x, self.seed, self.label, stream=self.stream)}
        values = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        return {"values": values.copy_(x)}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=parts["values"].device)
        return out.copy_(parts["values"].view(tuple(shape)))

    def nbytes(self, shape: Sequence[int]) -> int:
        return 2 * count(shape)

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {
            "codec": self.name,
            "stochastic": self.stochastic,
            "seed": self.seed,
            "label": self.label,
            "stream": self.stream,
        }
