"""Rotary embedding in GGUF's terms: the base, the kind of scaling, and Llama 3's factors as a tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from skimp.core.errors import ModelError


def rotary_facts(config: Any, arch: str) -> tuple[dict[str, Any], Tensor | None]:
    """(metadata, factors): the fields under `arch`.rope, and for Llama 3's rule what each frequency is divided by.

    Args:
        config: HF config object; `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises:
        ModelError: a rule llama.cpp computes otherwise, or not at all.
    """
    rule = dict(getattr(config, "rope_parameters", None) or {})
    if not rule:
        rule = {"rope_theta": getattr(config, "rope_theta", 10000.0), **(getattr(config, "rope_scaling", None) or {})}
    kind = rule.get("rope_type", rule.get("type", "default"))
    if float(rule.get("partial_rotary_factor", 1.0)) != 1.0 or kind not in ("default", "linear", "yarn", "llama3"):
        raise ModelError(
            "--to gguf",
            f"rotary embedding of kind '{kind}'" if kind != "default" else "rotary embedding of a part of each head",
            "llama.cpp computes the default, linear, yarn and llama3 rules over whole heads here",
            "--to merged",
        )
    fields: dict[str, Any] = {f"{arch}.rope.freq_base": float(rule["rope_theta"])}
    if kind in ("linear", "yarn"):
        fields[f"{arch}.rope.scaling.type"] = kind
        fields[f"{arch}.rope.scaling.factor"] = float(rule["factor"])
        if rule.get("original_max_position_embeddings"):
            fields[f"{arch}.rope.scaling.original_context_length"] = int(rule["original_max_position_embeddings"])
    return fields, llama3_factors(config, rule) if kind == "llama3" else None


def llama3_factors(config: Any, rule: dict[str, Any]) -> Tensor:
    """(head_dim / 2,) float32: 1 for short wavelengths, `factor` for long ones, smooth between them.

    Llama 3.1's rule, as its model card and transformers' `llama3` rope type have it: a wavelength beyond original /
    low_freq_factor is divided by `factor`, one below original / high_freq_factor is left, and between them the inverse
    frequencies are mixed linearly in original / wavelength.
    """
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    base, factor = float(rule["rope_theta"]), float(rule["factor"])
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    original = float(rule["original_max_position_embeddings"])
    wavelength = 2 * math.pi * base ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).float()
