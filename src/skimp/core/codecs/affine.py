"""Affine integers of 8 or 4 bits in groups of 256: value = scale · (code − zero), one scale and zero point a group.

Zhang et al., "Q-GaLore", 2024, arXiv 2407.08296, section 3.2, for projectors. The range of a group is widened to
contain 0: with the zero point merely clamped into the code range, as in the released code, a group of one sign is
destroyed (errors of 15 steps); widened, no error is above half a step. 1 + 8/256 = 1.031 or 0.531 bytes per element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import check_floating, count
from skimp.core.errors import SkimpError

GROUP = 256


@dataclass(frozen=True)
class Affine:
    """Parts: "codes" uint8 (⌈n/256⌉·256 of them, or half as many with two in a byte), "scale", "zero" float32."""

    bits: int = 8
    name: ClassVar[str] = "affine"
    block: ClassVar[int] = GROUP

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise SkimpError("codec 'affine' with 4 or 8 bits", f"{self.bits}")

    def spec(self, shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every part for a tensor of `shape`."""
        groups = -(-count(shape) // GROUP)
        return {
            "codes": ((groups * GROUP * self.bits // 8,), torch.uint8),
            "scale": ((groups,), torch.float32),
            "zero": ((groups,), torch.float32),
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """The nearest code of every element; NaN and infinities make their group's scale non-finite."""
        check_floating(self.name, x)
        n = x.numel()
        flat = torch.zeros(-(-n // GROUP) * GROUP, dtype=torch.float32, device=x.device)
        flat[:n].copy_(x.reshape(-1))
        groups = flat.view(-1, GROUP)
        low, high = groups.amin(1).clamp_max_(0.0), groups.amax(1).clamp_min_(0.0)
        most = 2**self.bits - 1
        scale = (high - low) / most
        steps = torch.where(scale == 0, torch.ones_like(scale), scale)
        zero = (-low / steps).round_()
        codes = (groups / steps.unsqueeze(1)).round_().add_(zero.unsqueeze(1)).clamp_(0, most).to(torch.uint8)
        codes = codes.view(-1)
        if self.bits == 4:
            codes = codes[0::2] | codes[1::2].bitwise_left_shift(4)
        return {"codes": codes, "scale": scale, "zero": zero}

    def decode(self, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, n = parts["codes"], count(shape)
        if codes.numel() != self.spec(shape)["codes"][0][0]:
            raise SkimpError(f"codec 'affine' decoding to {tuple(shape)}", f"{codes.numel()} bytes of codes")
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes.bitwise_right_shift(4)), 1).view(-1)
        values = codes.view(-1, GROUP).to(torch.float32).sub_(parts["zero"].unsqueeze(1))
        return values.mul_(parts["scale"].unsqueeze(1)).view(-1)[:n].view(tuple(shape)).to(dtype)

    def nbytes(self, shape: Sequence[int]) -> int:
        groups = -(-count(shape) // GROUP)
        return groups * (GROUP * self.bits // 8 + 8)

    def finite(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["scale"].isfinite().all()

    def meta(self) -> dict[str, Any]:
        return {"codec": self.name, "bits": self.bits}
