"""Put the fused layers into a model, by what a module is and not by which model it is in; reversible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.errors import EffectError
from skimp.kernels.fused import fits_native, rms_norm, swiglu
from skimp.kernels.native import library
from skimp.kernels.remade_linear import linear
from skimp.kernels.rotary_apply import FusedRotary

#: RMSNorms that are w * x / rms(x). Gemma's is (1 + w) * x / rms(x) and is left alone.
PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class Fused:
    """RMSNorm, SwiGLU and rotary modules of `model` run fused wherever the native form takes their tensors; trained
    linear layers that read what the first two made keep no input of their own (`remade_linear`).

    Args:
        accumulate: linear layers add a gradient to the one that their weight holds already inside the product, where
            autograd would make it whole and then add. For a loop that gives gradients to its rule after the last
            micro-batch, and hangs nothing on the arrival of each.
        halves: take bfloat16 and autocast too, through a float32 copy that lives for the call. Asked for by name only:
            the result is rounded once instead of twice, so it differs from the plain layers by a bfloat16 ulp.

    Attributes:
        norms, mlps: how many modules were changed; 0 without a compiler, and the model is as it was.
        rotary: the same for rotary positions; None without a compiler. float32 only: half tensors are turned plain.
        runs, plain_runs: calls of theirs that ran fused, and that did not (another dtype, another device).
    """

    def __init__(self, model: nn.Module, halves: bool = False, accumulate: bool = False) -> None:
        self.halves, self.accumulate = halves, accumulate
        self.rotary: FusedRotary | None = None
        self._changed: list[nn.Module] = []
        self.norms = self.mlps = self.runs = self.plain_runs = 0
        if not library.available():
            return
        self.rotary = FusedRotary(model)
        for module in model.modules():
            if type(module).__name__ in PLAIN_NORMS:
                self._put(module, self._norm(module))
                self.norms += 1
            elif _is_swiglu(module):
                self._put(module, self._mlp(module))
                self.mlps += 1
            elif type(module) is nn.Linear and "forward" not in vars(module):
                self._put(module, partial(self._linear, module))

    def _put(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        module.forward = forward
        self._changed.append(module)

    def remove(self) -> None:
        """Every module gets its own forward back."""
        for module in self._changed:
            del module.forward
        self._changed.clear()
        if self.rotary is not None:
            self.rotary.remove()

    def assert_effect(self) -> None:
        """Every changed module ran fused.

        Raises:
            EffectError: some ran plain, or none ran.
        """
        if self.plain_runs or not self.runs:
            raise EffectError(
                f"{self.norms} RMSNorms and {self.mlps} SwiGLUs fused",
                f"{self.runs} calls ran fused, {self.plain_runs} plain",
                "the native form takes contiguous float32 on a CPU, and bfloat16 where that was asked for",
                "leave the fused kernels out, or train in float32",
            )
        if self.rotary is not None and not self.halves:
            self.rotary.assert_effect()

    def _fits(self, x: Tensor, weight: Tensor) -> bool:
        return (self.halves or not torch.is_autocast_enabled("cpu")) and fits_native(x, weight, halves=self.halves)

    def _took(self, fused: bool) -> bool:
        self.runs += fused
        self.plain_runs += not fused
        return fused

    def _linear(self, module: nn.Linear, x: Tensor) -> Tensor:
        return linear(x, module.weight, module.bias, self.accumulate)

    def _norm(self, module: Any) -> Callable[..., Tensor]:
        plain = module.forward

        def forward(hidden_states: Tensor) -> Tensor:
            if self._took(self._fits(hidden_states, module.weight)):
                return rms_norm(hidden_states, module.weight, module.variance_epsilon)
            y: Tensor = plain(hidden_states)
            return y

        return forward

    def _mlp(self, module: Any) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            gate, up = module.gate_proj(x), module.up_proj(x)
            hidden = (
                swiglu(gate, up) if self._took(fits_native(gate, up, halves=self.halves)) else module.act_fn(gate) * up
            )
            y: Tensor = module.down_proj(hidden)
            return y

        return forward


def _is_swiglu(module: nn.Module) -> bool:
    parts = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = getattr(module, "act_fn", None)
    return all(isinstance(part, nn.Linear) for part in parts) and type(activation).__name__ in (
        "SiLU",
        "SiLUActivation",
    )
