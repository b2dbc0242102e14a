"""kernels: fused operations, each as reference, native CPU form and Triton form. Listed without importing them."""

from __future__ import annotations

import importlib
from typing import Any

from skimp.core.option import Option
from skimp.core.registry import Conflict, Facts, Paper

_LIGER = Paper("Liger Kernel: Efficient Triton Kernels for LLM Training", 2024, "2410.10989")

_ROUNDED_ONCE = Conflict(
    "in one pass a turned number is rounded to bfloat16 once, in the plain form after every product and sum: an exact "
    "kernel changes no bit",
    "precision: fp32; with bfloat16 weights positions turn in the plain form, the other kernels stay",
)

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
        conflicts=dict.fromkeys(("bf16", "adamw-bf16"), _ROUNDED_ONCE),
        recipe="exact: {kernels: fused}",
    ),
    Facts(
        name="s2-attention",
        kind="attention",
        summary="each head sees a window and every v-th block before it, heads taking turns: blocks left out cost no "
        "time, and generation keeps a share of the keys",
        where="skimp.kernels.sparse_apply:SparseAttention",
        attacks=("cache", "workspace"),
        exact=False,
        saves="of attention's time and of the cache about (w + (seq - w) / v) / seq remains, w = local × block tokens; "
        "5.7 of 26.6 s a step's attention at 16,384 tokens",
        paper=Paper("S2-Attention: Hardware-Aware Context Sharding among Attention Heads", 2024, "2407.17678"),
        stages=("pre-training", "continued pre-training", "long-context fine-tuning"),
        needs=(
            "a CPU and the native kernels (python -m skimp.kernels.native)",
            "training with it: a dense checkpoint that is converted is another model until it has been trained on",
        ),
        options={
            "block": Option(64, "Tokens of a block, a multiple of 16.", least=16, most=128),
            "local": Option(16, "Blocks of the window, the query's own counted.", least=1),
            "stride": Option(
                8,
                "Beyond the window a head sees every so many blocks; at most the number of key heads "
                "covers the context.",
                least=1,
            ),
            "offset": Option(0, "Added to the residues: 1 in the weights published as Phi-3-small.", least=0),
            "dense_heads": Option(0, "The last so many key heads see everything.", least=0),
            "dense_every": Option(0, "Every so many blocks one keeps its dense attention: 2 or more; 0 none.", least=0),
            "coverage": Option(
                "full",
                "full refuses a pattern whose heads together leave context out; partial takes it.",
                choices=("full", "partial"),
            ),
        },
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
