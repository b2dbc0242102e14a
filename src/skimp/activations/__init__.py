"""activations: what is kept for backward. Methods are listed without importing them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from skimp.core.registry import Conflict, Facts, Paper

_FUSED = Conflict(
    "a fused norm's output is made again from the norm's input, which is kept anyway, and one key fuses all layers: "
    "whole it costs nothing, and points of it would cost more",
    "exact.kernels=plain, or the fused kernels without points",
)
_ADAPTED = Conflict(
    "beside an adapter the layer's own weight is frozen and keeps nothing; what reads the input is the addition, whose "
    "thin gradient needs all of it",
    "activations: {kept_bits: 8}, which rounds what is kept",
)

FACTS: list[Facts] = [
    Facts(
        name="derivative",
        kind="saved-tensor policy",
        summary="activations keep their derivative in 4 bits, gated products and frozen norms their parts; the forward "
        "is exact, gradients are approximate",
        where="skimp.activations.derivative_apply:Derivatives",
        attacks=("activations",),
        exact=False,
        saves="0.5 bytes a number of an activation, 1.63 of a gated product, 0.56 of a frozen norm whose readers are "
        "frozen, where float32 keeps 4 to 12",
        paper=Paper(
            "S2A: A Unified Framework for Parameter and Memory Efficient Transfer Learning", 2025, "2503.08154"
        ),
        recipe="activations: {derivative: 4}",
    ),
    Facts(
        name="recompute",
        kind="saved-tensor policy",
        summary="keep a block's input only and run the block again in backward; all blocks or a chosen subset",
        where="skimp.activations.recompute:Recompute",
        attacks=("activations",),
        exact=True,
        saves="all of a block's kept activations but its input, for one more forward of that block",
        paper=Paper("Training Deep Nets with Sublinear Memory Cost", 2016, "1604.06174"),
        recipe="exact: {recompute: all}",
    ),
    Facts(
        name="activation-offload",
        kind="saved-tensor policy",
        summary="what a block keeps for backward waits on disk (a card: in host memory) and comes back in time",
        where="skimp.activations.offload:Offload",
        attacks=("activations",),
        exact=True,
        saves="what the chosen blocks keep, but for two of them, for the way of those bytes out and back",
        paper=Paper("SSDTrain: An Activation Offloading Framework to SSDs for Faster LLM Training", 2024, "2408.10013"),
        needs=("a folder on a disk, not in memory",),
        recipe="exact: {offload: {activations: disk}}",
    ),
    Facts(
        name="coded-activations",
        kind="saved-tensor policy",
        summary="what blocks keep for backward is rounded to 8 bits, or 4 but for attention; the forward is untouched",
        where="skimp.activations.coded:Coded",
        attacks=("activations",),
        exact=False,
        saves="1.03 bytes for each number that a block keeps instead of 4 (0.53 with 4 bits, but for attention's)",
        paper=Paper(
            "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training", 2021, "2104.14129"
        ),
        recipe="activations: {kept_bits: 8}",
    ),
    Facts(
        name="pamm",
        kind="saved-tensor policy",
        summary="queries, keys and values keep a few tokens of their input, and for each token which it is most like; "
        "the forward is exact, the three weights' gradients are approximate",
        where="skimp.activations.pamm:PAMM",
        attacks=("activations",),
        exact=False,
        saves="k·n·s + t·(s + 2) bytes of t tokens of n numbers of s bytes instead of t·n·s, k of them kept",
        paper=Paper("QKV Projections Require a Fraction of Their Memory", 2025, "2506.02939"),
        needs=("blocks that are not recomputed", "norms that do not run fused"),
        conflicts={
            **dict.fromkeys(("fused-rmsnorm", "fused-swiglu", "fused-rotary"), _FUSED),
            **dict.fromkeys(("adapter", "nf4", "int8", "int4", "sketch"), _ADAPTED),
        },
        recipe="activations: {pamm: 512}",
    ),
    Facts(
        name="chunked-mlp",
        kind="saved-tensor policy",
        summary="a block's MLP runs a few tokens at a time and keeps only its input; its insides are made again",
        where="skimp.activations.chunked_mlp:ChunkedMLP",
        attacks=("activations",),
        exact=True,
        saves="what an MLP keeps but its input, and all but one chunk of what it makes on the way, forward and "
        "backward; for one more forward of it, or none where its block is recomputed",
        paper=Paper(
            "Mini-Sequence Transformer: Optimizing Intermediate Memory for Long Sequences Training", 2024, "2407.15892"
        ),
        needs=("blocks with one MLP module that gives each token a row of its own",),
        recipe="exact: {mlp_chunk: 1024}",
    ),
    Facts(
        name="selective-recompute",
        kind="saved-tensor policy",
        summary="recomputed blocks keep what was dear to make: the attention's output, or that of every matrix product",
        where="skimp.activations.selective:Kept",
        attacks=("activations",),
        exact=True,
        saves="what recompute saves but one tensor of the layer's width (attention), or but all products' outputs; "
        "spares the second attention, or all second products",
        paper=Paper("Reducing Activation Recomputation in Large Transformer Models", 2022, "2205.05198"),
        needs=("recomputed blocks",),
        recipe="exact: {recompute: all, keep: attention}  # or products",
    ),
]


def __getattr__(name: str) -> Any:
    if name == "Derivatives":
        return import_module("skimp.activations.derivative_apply").Derivatives
    if name in ("Recompute", "Offload"):
        return getattr(import_module(f"skimp.activations.{name.lower()}"), name)
    if name == "Coded":
        return import_module("skimp.activations.coded").Coded
    if name == "PAMM":
        return import_module("skimp.activations.pamm").PAMM
    if name == "ChunkedMLP":
        return import_module("skimp.activations.chunked_mlp").ChunkedMLP
    if name == "Kept":
        return import_module("skimp.activations.selective").Kept
    raise AttributeError(f"module 'skimp.activations' has no attribute '{name}'")
