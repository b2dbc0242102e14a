"""One adapted linear layer from its parts: where A and B begin, what scales their product, what becomes of the rows.

The layer stays the module it was, with its weight under its name, frozen. Beside it come parameters and buffers:

    lora_A (r, inputs), lora_B (outputs, r)    trained
    lora_magnitude_vector (outputs,)           trained, where rows are normalised
    lora_A0, lora_B0                           frozen, where A and B begin from W or from what its codes leave over
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from skimp.adapters.dropout import dropout_here
from skimp.adapters.initial import FROM_BASE, draw, from_base, scratch
from skimp.adapters.linear import lora_linear
from skimp.adapters.merge import A0, B0, MAGNITUDE, A, B, add_products
from skimp.adapters.norms import Pair, row_norms
from skimp.adapters.spec import Spec
from skimp.adapters.targets import TargetError, is_transposed
from skimp.core.coded import Base, dense_rows, without_values
from skimp.core.errors import ConflictError
from skimp.core.position import recording


def sizes(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, however it stores its weight."""
    first, second = module.weight.shape
    return (second, first) if is_transposed(module) else (first, second)


def check_ranks(spec: Spec, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a rank above the smaller side of a layer.

    Args:
        shapes: layer -> (outputs, inputs).

    Raises:
        TargetError: with the largest rank that works.
    """
    wide = [name for name, shape in shapes.items() if spec.rank_of(name) > min(shape)]
    if wide:
        least = min(min(shapes[name]) for name in wide)
        raise TargetError(
            f"adapter.r: {spec.rank_of(wide[0])} on {wide[0]}",
            f"a matrix of {shapes[wide[0]][0]} x {shapes[wide[0]][1]}; {len(wide)} of {len(shapes)} are too small",
            "a product of that rank has more numbers than the matrix it is added to",
            [f"adapter.r={least}", "adapter.targets: only the larger layers"],
        )


class LowRank:
    """The addition of one module.

    Args:
        name, module: the linear layer.
        spec: of the whole adapter.

    Attributes:
        scale: s. merged: the weight holds the addition.
    """

    def __init__(self, name: str, module: Any, spec: Spec) -> None:
        self.name, self.module, self.spec = name, module, spec
        self.scale, self.merged = spec.factor(name), False
        self._kept: Tensor | None = None
        self._gain: Tensor | None = None
        self._begin()
        module.forward = self._forward()

    @property
    def weight(self) -> Tensor:
        """W as (outputs, inputs)."""
        weight: Tensor = self.module.weight
        return weight.t() if is_transposed(self.module) else weight

    def _dense(self, dtype: torch.dtype) -> Tensor:
        weight: Base = self.module.weight
        return dense_rows(weight, 0, sizes(self.module)[0], dtype, transposed=is_transposed(self.module))

    def pairs(self) -> list[Pair]:
        """The products that are added to W, the trained one first."""
        m = self.module
        found: list[Pair] = [(m.lora_A, m.lora_B, self.scale)]
        return found + ([(m.lora_A0, m.lora_B0, -self.scale)] if self.taken_out else [])

    @property
    def taken_out(self) -> bool:
        """Whether what A and B began with is subtracted; LoftQ's stays in, for what the codes have lost."""
        return self.spec.init in FROM_BASE

    @torch.no_grad()
    def _begin(self) -> None:
        spec, module = self.spec, self.module
        outputs, inputs = sizes(module)
        rank, like = spec.rank_of(self.name), module.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        a = torch.empty(rank, inputs, dtype=dtype, device=like.device)
        b = torch.zeros(outputs, rank, dtype=dtype, device=like.device)
        real = not without_values(like)
        if spec.keeps_start:
            if real and spec.init == "loftq":
                a, b = self._fitted()
            elif real:
                a, b = from_base(spec.init, self._dense(dtype), rank, self.scale, spec.seed, f"{self.name}.{A}")
            module.register_buffer(A0, a.clone(), persistent=False)
            module.register_buffer(B0, b.clone(), persistent=False)
        elif real:
            a.copy_(draw(spec.init, rank, inputs, spec.seed, f"{self.name}.{A}", a))
        module.register_parameter(A, nn.Parameter(a))
        module.register_parameter(B, nn.Parameter(b))
        if spec.reparam != "plain":
            lengths = self.lengths() if real else a.new_empty(outputs)
            module.register_parameter(MAGNITUDE, nn.Parameter(lengths))

    def _fitted(self) -> tuple[Tensor, Tensor]:
        """A and B as they were made with the layer's codes."""
        fit = getattr(getattr(self.module, "coder", None), "fit", None)
        if fit is None or fit.a.shape[0] != self.spec.rank_of(self.name):
            raise ConflictError(
                f"adapter 'loftq' on {self.name}",
                "no codes that were made with a product beside them",
                "codes and product are fitted to the dense weight together, before it is gone",
                ["model.weights=nf4 beside adapter=loftq", "LoftQ.on(model, codec, spec), on a dense model"],
            )
        self.module.coder = None
        return fit.a, fit.b

    def lengths(self) -> Tensor:
        """(outputs,) norms of the rows of W with its additions."""
        return row_norms(self.module.weight, self.pairs(), transposed=is_transposed(self.module))

    def gain(self) -> Tensor | None:
        """(outputs,) magnitude / ||W + s B A||, with gradients as the reparametrisation has them; None without one."""
        if self.spec.reparam == "plain":
            return None
        if self.spec.reparam == "dora":
            with torch.no_grad():
                lengths = self.lengths()
        else:
            lengths = self.lengths()
        found: Tensor = self.module.lora_magnitude_vector / lengths
        return found

    def _forward(self) -> Callable[[Tensor], Tensor]:
        module, transposed, plain, spec = self.module, is_transposed(self.module), self.module.forward, self.spec

        def forward(x: Tensor) -> Tensor:
            if self.merged:
                y: Tensor = plain(x)
                return y
            dropped = spec.dropout > 0.0 and module.training and recording()
            with torch.autocast(x.device.type, enabled=False):
                gain = self.gain()
            return lora_linear(
                x,
                module.weight,
                module.bias,
                module.lora_A,
                module.lora_B,
                self.scale,
                transposed=transposed,
                dropout=dropout_here(spec.dropout, spec.seed, self.name, x) if dropped else None,
                start=(module.lora_A0, module.lora_B0) if self.taken_out else None,
                gain=gain,
            )

        #: Read where a forward is run again by others, who may not know its place.
        forward.dropout = spec.dropout  # type: ignore[attr-defined]
        return forward

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What trains, by full name."""
        for part in (A, B, MAGNITUDE):
            if part in self.module._parameters:
                yield f"{self.name}.{part}", self.module._parameters[part]

    def frozen(self) -> Iterator[tuple[str, Tensor]]:
        """What A and B began with, by full name; nothing where they began from noise and 0."""
        for part in (A0, B0):
            if part in self.module._buffers:
                yield f"{self.name}.{part}", self.module._buffers[part]

    def scratch(self) -> int:
        """Bytes beside W that making the addition takes at most, the addition included."""
        outputs, inputs = sizes(self.module)
        rank, weight = self.spec.rank_of(self.name), self.module.weight
        made = sum(p.nbytes for _, p in self.trained()) + sum(t.nbytes for _, t in self.frozen())
        if not self.spec.keeps_start:
            made += 12 * rank * inputs + 64  # random words, and numbers made of them
        elif self.spec.init in FROM_BASE:
            made += scratch(
                self.spec.init, outputs, inputs, rank, weight.dtype.itemsize if isinstance(weight, Tensor) else 0
            )
        return made + (4 * 4 * rank * (outputs + 2 * rank) if self.spec.reparam != "plain" else 0)

    def merge(self, keep: bool) -> tuple[float, float]:
        """The addition into the weight; (largest change, largest rounding)."""
        self._kept = self.module.weight.detach().clone() if keep else None
        change, lost, self._gain = add_products(self.weight, self.pairs(), self.module._parameters.get(MAGNITUDE))
        self.merged = True
        return change, lost

    def unmerge(self) -> None:
        """Out again: from the copy, else divided by what scaled the rows and subtracted."""
        if self._kept is not None:
            self.module.weight.copy_(self._kept)
        else:
            if self._gain is not None:
                self.weight.div_(self._gain.unsqueeze(1))
            add_products(self.weight, [(a, b, -s) for a, b, s in self.pairs()])
        self._kept = self._gain = None
        self.merged = False

    @property
    def kept(self) -> bool:
        """Whether a merged weight can be restored to the bit."""
        return self._kept is not None

    def remove(self) -> None:
        """The layer as it was before."""
        del self.module.forward
        for part in (A, B, MAGNITUDE):
            self.module._parameters.pop(part, None)
        for part in (A0, B0):
            if part in self.module._buffers:
                delattr(self.module, part)
