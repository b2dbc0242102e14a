"""The identity codec: float32, 4 bytes per element. The yardstick for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count


@dataclass(frozen=True)
class Float32:
    """Parts: "values" float32, shaped like the tensor. Exact for float32, bf16 and fp16; rounds float64."""

    name: ClassVar[str] = "float32"
    block: ClassVar[int] = 1

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        check_floating(self.name, x)
        values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        return {"values": values.copy_(x)}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=parts["values"].device)
        return out.copy_(parts["values"].view(tuple(shape)))

    def nbytes(self, shape: Sequence[int]) -> int:
        return 4 * count(shape)

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name}
