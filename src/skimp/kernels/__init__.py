"""kernels: fused operations, each as reference, native CPU form and Triton form. Listed without importing them."""

from __future__ import annotations

import importlib
from typing import Any

from skimp.core.registry import Facts, Paper

_LIGER = Paper("Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, "2410.10989")

FACTS: list[Facts] = [
    Facts(
        name="fused-rmsnorm",
        kind="kernel",
        summary="RMSNorm and LayerNorm in one pass forward and two backward, keeping the input and two numbers a row",
        where="skimp.kernels.fused:rms_norm",
        attacks=("activations",),
        exact=True,
        saves="two tensors of its width: 2 x rows x hidden x 4 bytes a norm; linear layers behind it keep none",
        paper=_LIGER,
        needs=(
            "a CPU; bfloat16 only when asked for by name (exact.kernels=fused)",
            "the native kernels (python -m skimp.kernels.native)",
        ),
        recipe="exact: {kernels: fused}",
    ),
    Facts(
        name="fused-swiglu",
        kind="kernel",
        summary="SwiGLU, GeGLU and GELU in one pass each way, keeping only what goes in",
        where="skimp.kernels.fused:swiglu",
        attacks=("activations",),
        exact=True,
        saves="two tensors of the MLP's width per block: 2 x rows x intermediate x 4 bytes; down_proj keeps none",
        paper=_LIGER,
        needs=(
            "a CPU; bfloat16 only when asked for by name (exact.kernels=fused)",
            "the native kernels (python -m skimp.kernels.native)",
        ),
        recipe="exact: {kernels: fused}",
    ),
    Facts(
        name="fused-rotary",
        kind="kernel",
        summary="rotary positions in one pass each way, for any model that turns halves of its heads",
        where="skimp.kernels.rotary:rotary",
        attacks=("activations",),
        exact=True,
        saves="nothing that is kept; time (about sixteen passes over queries and keys become two) and what they held",
        paper=Paper("RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, "2104.09864"),
        needs=("float32 on a CPU", "the native kernels (python -m skimp.kernels.native)"),
        recipe="exact: {kernels: fused}",
    ),
]

_WHERE = {
    "Fused": "apply",
    "rotary": "rotary",
    "rotary_reference": "rotary",
    "kernel": "forms",
    "rms_norm": "fused",
    "rms_norm_reference": "fused",
    "swiglu": "fused",
    "swiglu_reference": "fused",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"skimp.kernels.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'skimp.kernels' has no attribute '{name}'")
