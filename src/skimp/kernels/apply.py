"""Put the fused layers into a model, by what a module is and not by which model it is in; reversible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skimp.core.coded_linear import CodedLinear
from skimp.core.errors import EffectError
from skimp.kernels.fused import rms_norm, swiglu
from skimp.kernels.gelu import geglu, gelu
from skimp.kernels.layer_norm import layer_norm
from skimp.kernels.native import library
from skimp.kernels.native.layers import LAYERS
from skimp.kernels.remade_linear import linear, linear_in_out
from skimp.kernels.rotary_apply import FusedRotary
from skimp.kernels.widened import fits_native

#: RMSNorms that are w * x / rms(x), and those that are (1 + w) * x / rms(x).
PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
OFFSET_NORMS = ("GemmaRMSNorm", "Gemma2RMSNorm")
#: GELU as HF's families name it, by whether it is the approximation by tanh.
GELUS = {
    "GELUActivation": False, "NewGELUActivation": True, "GELUTanh": True, "PytorchGELUTanh": True,
    "FastGELUActivation": True,
}  # fmt: skip


class Fused:
    """Norms, activations and rotary modules of `model` run fused wherever the native form takes their tensors; trained
    linear layers that read what the first two made keep no input of their own (`remade_linear`).

    RMSNorm (w x and (1 + w) x), LayerNorm; SwiGLU, GeGLU, GELU; by what a module is, whatever the family.

    Args:
        accumulate: linear layers add a gradient to the one that their weight holds already inside the product, where
            autograd would make it whole and then add. For a loop that gives gradients to its rule after the last
            micro-batch, and hangs nothing on the arrival of each.
        halves: take bfloat16 and autocast too, through a float32 copy that lives for the call. Asked for by name only:
            the result is rounded once instead of twice, so it differs from the plain layers by a bfloat16 ulp.

    Attributes:
        norms, mlps: how many norms and activations were changed; 0 without a compiler, and the model is as it was.
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
        gated: set[Any] = set()
        for module in model.modules():
            norm, gate = self._norm(module), _gate(module)
            if norm is not None:
                self._put(module, norm)
                self.norms += 1
            elif gate is not None:
                self._put(module, self._mlp(module, gate))
                gated.add(module.act_fn)
                self.mlps += 1
            elif (by_tanh := _gelu(module)) is not None and module not in gated:
                self._put(module, self._activation(module, by_tanh))
                self.mlps += 1
            elif "forward" not in vars(module) and type(module) is nn.Linear:
                self._put(module, partial(self._linear, module, linear))
            elif "forward" not in vars(module) and type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
                self._put(module, partial(self._linear, module, linear_in_out))

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
                f"{self.norms} norms and {self.mlps} activations fused",
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

    def _linear(self, module: Any, form: Callable[..., Tensor], x: Tensor) -> Tensor:
        return form(x, module.weight, module.bias, self.accumulate)

    def _norm(self, module: Any) -> Callable[..., Tensor] | None:
        name, plain = type(module).__name__, module.forward
        run: Callable[[Tensor], Tensor]
        if name in PLAIN_NORMS:
            run = lambda x: rms_norm(x, module.weight, module.variance_epsilon)
        elif name in OFFSET_NORMS:
            run = lambda x: rms_norm(x, module.weight + 1.0, module.eps)
        elif _is_layer_norm(module):
            run = lambda x: layer_norm(x, module.weight, module.bias, module.eps)
        else:
            return None

        def forward(hidden_states: Tensor) -> Tensor:
            if self._took(self._fits(hidden_states, module.weight)):
                return run(hidden_states)
            y: Tensor = plain(hidden_states)
            return y

        return forward

    def _mlp(self, module: Any, gate_kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor) -> Tensor:
            gate, up = module.gate_proj(x), module.up_proj(x)
            if self._took(fits_native(gate, up, halves=self.halves)):
                hidden = gate_kernel(gate, up)
            else:
                hidden = module.act_fn(gate) * up
            y: Tensor = module.down_proj(hidden)
            return y

        return forward

    def _activation(self, module: Any, by_tanh: bool) -> Callable[..., Tensor]:
        plain = module.forward

        def forward(x: Tensor) -> Tensor:
            if self._took(fits_native(x, halves=self.halves)):
                return gelu(x, by_tanh)
            y: Tensor = plain(x)
            return y

        return forward


def _gelu(module: Any) -> bool | None:
    """Whether the module is a GELU by tanh or an exact one; None where it is none, or its kernel is not built."""
    if not LAYERS.available():
        return None
    if type(module) is nn.GELU:
        return bool(module.approximate == "tanh")
    return GELUS.get(type(module).__name__)


def _gate(module: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The kernel of a gated MLP; None for any other module."""
    parts = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not all(isinstance(part, (nn.Linear, CodedLinear)) for part in parts):
        return None
    activation = getattr(module, "act_fn", None)
    if type(activation).__name__ in ("SiLU", "SiLUActivation"):
        return swiglu
    by_tanh = _gelu(activation)
    return None if by_tanh is None else partial(geglu, by_tanh=by_tanh)


def _is_layer_norm(module: Any) -> bool:
    """Over the last dimension, with weight and bias, and its kernel built."""
    found = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and LAYERS.available()
    return bool(found and module.weight is not None and module.bias is not None)
