"""A linear layer whose weight is kept in a codec: the one home of every quantised base.

Its parts are buffers, `weight_codes`, `weight_absmax` and so on, so they save, load, move and shard as any tensor does;
its bias stays as it was. `weight` is the `Coded` matrix: it has shape, dtype and device, and no numbers of its own
until some rows are asked for. Nothing is kept for backward: dx = G W, with W decoded again slice by slice.

Memory: the codec's bytes (NF4 with double quantisation 0.516 a weight, where float32 takes 4), and one slice while it
multiplies (`core.coded`).

The codes are frozen unless `core.coded_trained` makes them train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from skimp.core.coded import Coded, product, product_back
from skimp.core.errors import SkimpError

PREFIX = "weight_"


class CodedLinear(nn.Module):
    """y = x W' + b with W (outputs, inputs) in the parts of `codec`.

    Args:
        inputs, outputs: sizes. codec: a codec that decodes rows. dtype: of what it decodes to, and of the bias.
        bias: whether there is one. device: of the parts; "meta" has none.
        stored_transposed: the layer it stands for kept (inputs, outputs), as GPT-2's Conv1D; W is turned when it is
            encoded.

    Attributes:
        trained: what makes the codes train (`core.coded_trained.Trained`); None while they are frozen.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        codec: Any,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        device: torch.device | str | None = None,
        stored_transposed: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.codec, self.dtype, self.stored_transposed = codec, dtype, stored_transposed
        #: crc32 of the dense weight as it came, for the base's fingerprint; None before it is encoded.
        self.dense_crc: int | None = None
        #: Who makes the parts of a dense (outputs, inputs) weight in the codec's place: an initialiser that looks at
        #: what the codec leaves over. None is the codec itself.
        self.coder: Callable[[Tensor], Mapping[str, Tensor]] | None = None
        self.trained: Any = None
        for name, (shape, kind) in codec.spec((outputs, inputs)).items():
            self.register_buffer(PREFIX + name, torch.empty(shape, dtype=kind, device=device))
        if bias:
            self.bias: nn.Parameter | None = nn.Parameter(
                torch.empty(outputs, dtype=dtype, device=device), requires_grad=False
            )
        else:
            self.register_parameter("bias", None)

    @property
    def weight(self) -> Coded:
        """The matrix in its parts; `core.coded` multiplies by it."""
        return Coded(self.parts(), self.codec, torch.Size((self.out_features, self.in_features)), self.dtype)

    def parts(self) -> dict[str, Tensor]:
        """The codec's parts by name."""
        return {k.removeprefix(PREFIX): v for k, v in self.named_parts()}

    def named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """The same by the names of their buffers."""
        return ((k, v) for k, v in self._buffers.items() if v is not None and k.startswith(PREFIX))

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Encode a dense weight, (outputs, inputs) or as the layer it stands for stored it, into the parts.

        Raises:
            SkimpError: another shape; what the codec refuses (NaN, infinity).
        """
        wanted = (self.in_features, self.out_features) if self.stored_transposed else self.weight.shape
        if tuple(weight.shape) != tuple(wanted):
            raise SkimpError("a weight to encode", f"shape {tuple(weight.shape)}", f"the layer has {tuple(wanted)}")
        encoded = (self.coder or self.codec.encode)(weight.t() if self.stored_transposed else weight)
        for name, part in self.parts().items():
            part.copy_(encoded[name])

    def forward(self, x: Tensor) -> Tensor:
        """x (…, inputs) -> (…, outputs) in x's dtype, or the autocast dtype where autocast is on."""
        if self.trained is not None:
            y: Tensor = self.trained.forward(self, x)
            return y
        return coded_linear(x, self.weight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> CodedLinear:
        """Moves the parts and never casts them, as scales of another dtype would be other weights: a cast changes what
        they decode to."""
        parts = {key: value for key, value in self._buffers.items() if value is not None}
        for key in parts:
            self._buffers[key] = None
        try:
            super()._apply(fn, recurse)
            probe = fn(torch.empty(0, dtype=self.dtype, device=next(iter(parts.values())).device))
            for key, part in parts.items():
                same = fn(part[:0]).dtype == part.dtype
                parts[key] = fn(part) if same else part.to(probe.device)
            self.dtype = probe.dtype
        finally:
            self._buffers.update(parts)
        return self

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, codec={self.codec}"


def coded_layers(model: nn.Module) -> Iterator[tuple[str, CodedLinear]]:
    """Every coded layer of a model by full name."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, CodedLinear))


def coded_linear(x: Tensor, weight: Coded, bias: Tensor | None = None) -> Tensor:
    """x W' + b, for x (…, inputs), which gets its gradient, as does a bias that asks for one."""
    y: Tensor = _CodedLinear.apply(x, weight, bias)
    return y


class _CodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Coded, bias: Tensor | None) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.weight, ctx.shape, ctx.dtype = weight, x.shape, x.dtype
        with torch.autocast(kind, enabled=False):
            y = product(weight, x.reshape(-1, x.shape[-1]).to(dtype), bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        g = upstream.reshape(-1, upstream.shape[-1])
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = product_back(ctx.weight, g).view(ctx.shape).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            db = g.sum(0)
        return dx, None, db
