"""Inner rules: what turns a gradient-like tensor into a move, whatever it is the gradient of.

The projected family runs one of these on the small tensor R = Pᵀ·G and lifts the answer; a whole parameter is the
case R = G. A rule says what state it keeps for a shape (`state_spec`) and gives the move (`move`); decay, projection
and the write to the weight belong to the caller. So one Lion serves both a plain optimizer and GaLore.

Adam here *is* `adamw` and `adamw8bit`: their kernels step a tensor of zeros, which afterwards holds −lr·m̂/(√v̂ + eps).
With the identity for a projection the weights are those rules' own, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.codecs.bf16 import stochastic_round
from skimp.optim.adamw import fused_adamw_
from skimp.optim.adamw8bit import MIN_ELEMENTS, coded_spec
from skimp.optim.adamw8bit_step import adamw8bit
from skimp.optim.state import Spec

Codec = Literal["fp32", "bf16", "int8"]


class Inner(Protocol):
    """A rule on one gradient-like tensor. Its keys of the state are its own: no other stage of a pipeline has them."""

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        """State for a gradient of `shape`; `dtype` is the dtype of the arithmetic, float32 or float64."""
        ...

    def move(
        self, g: Tensor, state: dict[str, Any], lr: float, step: int, group: Mapping[str, Any], name: str
    ) -> Tensor:
        """What is to be added to the thing `g` is the gradient of: a new tensor, −lr · direction.

        Args:
            g: float32 or float64, contiguous; not kept, not changed.
            state: of the whole parameter; this rule's keys are updated in place.
            lr: the rate of this step.
            step: steps with this state, from 1; begins anew where a pipeline resets the moments.
            group: the options (betas, eps, seed, …).
            name: the address of any noise the rule draws.
        """
        ...


@dataclass(frozen=True)
class Adam:
    """Adam with its moments in a codec.

    Attributes:
        states: fp32 keeps them in the dtype of the arithmetic, bf16 rounds them at random (2 bytes), int8 codes them
            in blocks of 256 (1.016 bytes; tensors under 4,096 elements keep fp32).
        eps_outside: the released GaLore divides by √v + eps and corrects the bias afterwards, so that eps counts
            1/√(1−β₂ᵗ) times as much; here by default it is added after the correction, as in torch.
    """

    states: Codec = "fp32"
    eps_outside: bool = False

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype) -> Spec:
        shape = tuple(shape)
        if self.states == "int8" and count(shape) >= MIN_ELEMENTS:
            return coded_spec(shape)
        kind = torch.bfloat16 if self.states == "bf16" else dtype
        return {"m": (shape, kind), "v": (shape, kind)}

    def move(
        self, g: Tensor, state: dict[str, Any], lr: float, step: int, group: Mapping[str, Any], name: str
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        eps = float(group["eps"])
        if self.eps_outside:
            eps /= math.sqrt(1.0 - beta2**step)
        move = torch.zeros_like(g)
        if "m_absmax" in state:
            moments = (state["m"], state["m_absmax"], state["v"], state["v_absmax"])
            adamw8bit(move, g, *moments, lr, beta1, beta2, eps, 0.0, step, 0)
            return move
        m, v = state["m"], state["v"]
        coded = m.dtype == torch.bfloat16 and g.dtype != torch.bfloat16
        here = {"step": step, "m": m.to(g.dtype) if coded else m, "v": v.to(g.dtype) if coded else v}
        fused_adamw_(move, g, here, {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": 0.0})
        if coded:
            seed = int(group.get("seed", 0))
            m.copy_(stochastic_round(here["m"], seed, f"{name}.m", stream=step))
            v.copy_(stochastic_round(here["v"], seed, f"{name}.v", stream=step))
        return move
