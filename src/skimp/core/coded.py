"""A matrix that is kept as the parts of a codec, and the products with it: no dense copy beyond a slice of rows.

`Coded` stands where a frozen weight stands: it has a shape, a dtype (of what it decodes to) and a device. The functions
here take either form, so that a method which multiplies by a frozen base is written once: y = x W' + b is `product`,
dx = G W is `product_back`, and `dense_rows` is for whoever needs some of W's own numbers (norms of rows, merges).

Workspace: one slice of at most `SLICE` numbers in the product's dtype (4 MiB of float32), and what the codec itself
takes to decode it. A matrix of no more than that is one slice; its products are then those of the dense matrix, to the
bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from skimp.core.codecs.base import Codec
from skimp.core.read import is_simulated
from skimp.core.repeat import rounds

#: Numbers of a decoded slice: 4 MiB in float32.
SLICE = 2**20


class RowCodec(Codec, Protocol):
    """A codec of matrices that can decode some rows by themselves."""

    def rows(
        self, parts: Mapping[str, Tensor], shape: Sequence[int], start: int, stop: int, dtype: torch.dtype
    ) -> Tensor:
        """Rows start:stop, (stop - start, columns), as `decode` gives them."""
        ...

    def spec(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part."""
        ...


@dataclass(frozen=True)
class Coded:
    """A frozen (outputs, inputs) matrix in the parts of `codec`; `dtype` is what it decodes to."""

    parts: Mapping[str, Tensor]
    codec: RowCodec
    shape: torch.Size
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    @property
    def requires_grad(self) -> bool:
        return False

    def numel(self) -> int:
        """Numbers that it stands for, not bytes that it takes."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    def rows(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows start:stop, decoded: (stop - start, inputs)."""
        decoded: Tensor = self.codec.rows(self.parts, tuple(self.shape), start, stop, dtype or self.dtype)
        return decoded

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """All of it, decoded."""
        return self.rows(0, self.shape[0], dtype)


#: A frozen weight in either form.
Base: TypeAlias = Tensor | Coded


def without_values(base: Base) -> bool:
    """Whether it is simulated: shapes and no numbers."""
    return is_simulated(base if isinstance(base, Tensor) else next(iter(base.parts.values())))


def dense_rows(base: Base, start: int, stop: int, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Rows start:stop of W (outputs, inputs) in `dtype`; of a dense weight a view where its dtype is that already.

    `transposed`: the dense weight is stored (inputs, outputs), as GPT-2's is; a coded one never is.
    """
    if isinstance(base, Coded):
        return base.rows(start, stop, dtype)
    return (base.t() if transposed else base)[start:stop].to(dtype)


def product(base: Base, x: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """x W' + b for x (tokens, inputs): (tokens, outputs) in x's dtype. W and b are cast to it for the product."""
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(base, Tensor):
        w = base.to(x.dtype)
        w = w if transposed else w.t()
        return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
    directly = base.codec.few(base.parts, base.shape, x, bias) if hasattr(base.codec, "few") else None
    if directly is not None:
        few: Tensor = directly
        return few
    starts = slice_starts(base)
    if len(starts) == 1:
        w = base.dense(x.dtype).t()
        return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)
    y = x.new_empty(x.shape[0], base.shape[0])
    for start in rounds(starts):
        stop = min(start + starts.step, base.shape[0])
        w = base.rows(start, stop, x.dtype).t()
        torch.mm(x, w, out=y[:, start:stop])
        del w  # before the next is made
    return y if bias is None else y.add_(bias)


def product_back(base: Base, g: Tensor, *, transposed: bool = False) -> Tensor:
    """g W for g (tokens, outputs): (tokens, inputs) in g's dtype; slices are summed in float32 at least."""
    if isinstance(base, Tensor):
        w = base.to(g.dtype)
        return torch.mm(g, w.t() if transposed else w)
    starts = slice_starts(base)
    if len(starts) == 1:
        return torch.mm(g, base.dense(g.dtype))
    wide = torch.promote_types(g.dtype, torch.float32)
    dx = g.new_zeros(g.shape[0], base.shape[1], dtype=wide)
    for start in rounds(starts):
        stop = min(start + starts.step, base.shape[0])
        w = base.rows(start, stop, g.dtype)
        if wide == g.dtype:
            dx.addmm_(g[:, start:stop], w)
        else:
            dx.add_(torch.mm(g[:, start:stop], w))
        del w
    return dx.to(g.dtype)


def slice_starts(base: Coded) -> range:
    """First rows of slices of at most SLICE numbers and at least one row."""
    outputs, inputs = base.shape
    return range(0, max(1, outputs), max(1, min(outputs, SLICE // max(1, inputs))))
