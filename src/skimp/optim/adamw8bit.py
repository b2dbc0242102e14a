"""AdamW with 8-bit moments: 2 + 8/256 = 2.03 bytes of state per parameter instead of 8.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021, arXiv 2110.02861. 134 M parameters: 273
MB of state instead of 1.08 GB. The arithmetic is that of `skimp.optim.adamw_math`; the moments live as codes
of `skimp.core.codecs.dynamic8` in blocks of 256 and exist in float32 one block at a time.

A moment that is not zero is never stored as zero: its code is at least the one next to 0. For m that keeps
its sign (the sign fix of bitsandbytes, here in both directions). For v it is what makes the rule stable: v
spans g², so an element with a gradient 2,500 times below its block's largest would get v = 0 and then a step
of lr·m/eps. Measured on a tiny Llama, 60 steps: losses within 0.03 % of float32 states, without it within 0.6
%.

A sharded parameter (FSDP2) has its blocks counted from the first number of each shard, so that none straddles two
processes. The step is then that of one process bit for bit where a shard is a multiple of 256 numbers; elsewhere the
blocks, hence the rounding of moments, are cut differently.

Further differences from bitsandbytes: decay comes before the update, as in PyTorch (its CUDA kernel decays
after, which differs by terms of lr²·wd); blocks of 256 in every case; its CPU encoder is approximate, this
one takes the nearest entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from skimp.core.codecs.base import count
from skimp.core.codecs.dynamic8_chunks import BLOCK, padded
from skimp.core.errors import SkimpError
from skimp.core.noise import key64
from skimp.core.sharded import Part
from skimp.optim.adamw import fused_adamw_
from skimp.optim.adamw8bit_step import adamw8bit
from skimp.optim.adamw_bf16 import check_gradient, rounded_adamw_
from skimp.optim.base import UpdateRule
from skimp.optim.options import check_options, lr_of
from skimp.optim.state import Spec

#: Tensors with fewer elements keep float32 moments: they are norms and biases, 0.05 % of a model and its most
#: sensitive part. As in bitsandbytes, but for sharded parameters: it counts the shard it is given, here the whole
#: tensor counts. What a tensor is does not change with the number of processes, they all keep the same kind of state
#: (the last may hold few rows, or none), and a checkpoint says nothing of how many there were.
MIN_ELEMENTS = 4096


class AdamW8bit(UpdateRule):
    """AdamW with block-wise dynamic 8-bit moments.

    State of a tensor with at least 4,096 elements: m, v uint8 shaped like it; m_absmax, v_absmax float32
    (⌈n/256⌉,). Of a smaller one: m, v float32, and its step is that of `AdamW` bit for bit (of `AdamWBF16`
    with float32 states when it is bf16).

    Args:
        params: parameters, groups or `named_parameters()`; float32, or bf16 with stochastic rounding.
        lr, betas, eps, weight_decay: as in torch; eps above 0, because a coded second moment may be 0 where
            the first is not.
        seed: with the parameter's name and step the address of the rounding noise of bf16 weights.

    Raises:
        SkimpError: an option out of range, or a parameter that is neither float32 nor bf16.
    """

    rule: ClassVar[str] = "adamw8bit"
    block: ClassVar[int] = BLOCK

    def __init__(
        self,
        params: Any,
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        seed: int = 0,
    ) -> None:
        check_options(self.rule, lr, betas, eps, weight_decay, eps_min=1e-30)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    def check_parameter(self, name: str, p: Tensor) -> None:
        super().check_parameter(name, p)
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise SkimpError(
                f"adamw8bit on parameter '{name}'",
                f"dtype {p.dtype}",
                "it steps in float32 and writes float32 or bf16 weights",
                "model.to(torch.float32) or model.to(torch.bfloat16) before the optimizer",
            )

    def state_spec(self, shape: Sequence[int], dtype: torch.dtype, whole: int | None = None) -> Spec:
        shape, n = tuple(shape), count(shape)
        if (n if whole is None else whole) < MIN_ELEMENTS:
            return {"m": (shape, torch.float32), "v": (shape, torch.float32)}
        return coded_spec(shape)

    def rule_for(self, p: Tensor) -> str:
        return self.rule if p.numel() >= MIN_ELEMENTS else f"{self.rule} (float32 states)"

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any], part: Part) -> None:
        if part.whole >= MIN_ELEMENTS:
            check_gradient(self.rule, part.name, grad)
            adamw8bit(
                p,
                grad,
                state["m"],
                state["m_absmax"],
                state["v"],
                state["v_absmax"],
                lr_of(group),
                *group["betas"],
                group["eps"],
                group["weight_decay"],
                state["step"],
                key64(group["seed"], part.address),
                part.offset,
            )
        elif p.dtype == torch.bfloat16:
            rounded_adamw_(part, p, grad, state, group)
        else:
            fused_adamw_(p, grad, state, group)


def coded_spec(shape: Sequence[int]) -> Spec:
    """State of moments coded in blocks of 256."""
    shape, blocks = tuple(shape), (padded(count(shape)) // BLOCK,)
    return {
        "m": (shape, torch.uint8),
        "m_absmax": (blocks, torch.float32),
        "v": (shape, torch.uint8),
        "v_absmax": (blocks, torch.float32),
    }
