"""AdamW for the parameters that a projected rule leaves whole: embeddings, head, norms, biases, small matrices.

In place and without temporaries, by the kernels of `adamw`, `adamw8bit` and `adamw-bf16`, whichever fits the weight
and the codec of the states; equal to those rules bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.optim.adamw import fused_adamw_
from skimp.optim.adamw8bit import MIN_ELEMENTS, coded_spec
from skimp.optim.adamw8bit_step import adamw8bit
from skimp.optim.adamw_bf16 import check_gradient, rounded_adamw_
from skimp.optim.inner import Codec
from skimp.optim.options import lr_of
from skimp.optim.state import Spec


def plain_spec(shape: Sequence[int], dtype: torch.dtype, whole: int, states: Codec) -> Spec:
    """State of a parameter (or part) of `shape` and dtype; `whole` numbers of the whole decide whether it is coded."""
    shape = tuple(shape)
    if states == "int8" and whole >= MIN_ELEMENTS:
        return coded_spec(shape)
    low = torch.bfloat16 if states == "bf16" and dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)
    return {"m": (shape, low), "v": (shape, low)}


def plain_step(rule: str, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
    """One AdamW step in place; `state` is `plain_spec`'s and `state["step"]` counts from 1."""
    if "m_absmax" in state:
        check_gradient(rule, part.name, grad)
        moments = (state["m"], state["m_absmax"], state["v"], state["v_absmax"])
        numbers = (lr_of(group), *group["betas"], group["eps"], group["weight_decay"], state["step"])
        adamw8bit(p, grad, *moments, *numbers, key64(group["seed"], part.address), part.offset)
    elif p.dtype == torch.bfloat16:
        rounded_adamw_(part, p, grad, state, group)
    else:
        fused_adamw_(p, grad, state, group)
