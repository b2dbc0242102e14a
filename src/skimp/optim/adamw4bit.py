"""AdamW with 4-bit moments: 2 · (1/2 + 4/128) = 1.06 bytes of state per parameter instead of 8.

Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States", 2023, arXiv 2309.01507. 134 M parameters: 143 MB of
state instead of 1.08 GB. The arithmetic is that of `skimp.optim.adamw_math`; the moments live as codes of
`skimp.core.codecs.block4` in blocks of 128.

The first moment is rounded at random, with noise addressed by (seed, name, step, place). Rounded to nearest it stands
still: it moves by a tenth of its distance to the gradient, which is mostly below half a step of 16 entries. On a tiny
Llama, 60 steps, that cost 8.9 % of the loss; rounded at random 0.2 % (`tests/optim/test_adamw_rules.py` holds both
moments together to 2.5 %). The second moment's map has no zero: a number whose g² is below 1/32 of its block's largest
counts as 1/16 of it, and its step is that much smaller than Adam's, never larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.codecs.block4_chunks import padded4
from skimp.core.codecs.block4_map import BLOCK4
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.optim.adamw4bit_step import adamw4bit
from skimp.optim.adamw8bit import MIN_ELEMENTS, AdamW8bit
from skimp.optim.adamw_bf16 import check_gradient
from skimp.optim.options import lr_of
from skimp.optim.state import Spec


class AdamW4bit(AdamW8bit):
    """AdamW with block-wise 4-bit moments; options and refusals are those of `AdamW8bit`.

    State of a tensor with at least 4,096 elements: m, v uint8 (64 · ⌈n/128⌉,), two codes a byte; m_absmax, v_absmax
    float32 (⌈n/128⌉,). A smaller one keeps float32 moments.
    """

    rule: ClassVar[str] = "adamw4bit"
    block: ClassVar[int] = BLOCK4

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        shape, n = tuple(shape), count(shape)
        if (n if whole is None else whole) < MIN_ELEMENTS:
            return {"m": (shape, torch.float32), "v": (shape, torch.float32)}
        codes, maxima = (padded4(n) // 2,), (padded4(n) // BLOCK4,)
        return {
            "m": (codes, torch.uint8),
            "m_absmax": (maxima, torch.float32),
            "v": (codes, torch.uint8),
            "v_absmax": (maxima, torch.float32),
        }

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        if part.whole < MIN_ELEMENTS:
            super().update(p, grad, state, group, part)
            return
        check_gradient(self.rule, part.name, grad)
        moments = (state["m"], state["m_absmax"], state["v"], state["v_absmax"])
        options = (lr_of(group), *group["betas"], group["eps"], group["weight_decay"])
        adamw4bit(p, grad, *moments, *options, state["step"], key64(group["seed"], part.address), part.offset)
