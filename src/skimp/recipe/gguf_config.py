"""From GGUF metadata to the config.json that transformers would have for the same model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from skimp.core.errors import ModelError
from skimp.recipe.families import FAMILIES
from skimp.recipe.gguf_header import Header, read_floats, read_header

#: GGUF's general.architecture -> model_type. Mistral files call themselves llama, which computes the same.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gpt2": "gpt2",
}

_ROTARY = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_GPT2 = {
    "n_embd": "embedding_length",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}


def gguf_config(path: str | Path) -> dict[str, Any]:
    """The HF config of the model in a GGUF file; the file is not read beyond its header.

    Raises:
        ModelError: not a GGUF file, an architecture skimp does not know, or a header without one of its
            sizes.
    """
    header = read_header(path)
    arch = header.fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"model {path}",
            f"unknown architecture '{arch}'",
            instead=f"GGUF architectures known: {', '.join(ARCHITECTURES)}",
        )
    kind = ARCHITECTURES[arch]
    sizes = _GPT2 if kind == "gpt2" else _ROTARY
    config: dict[str, Any] = {"model_type": kind, "architectures": [FAMILIES[kind]]}
    for key, name in sizes.items():
        config[key] = _needed(header, f"{arch}.{name}", path)
    for key in ("rms_norm_eps", "layer_norm_epsilon"):
        if key in config:
            config[key] = _short(config[key])
    config["vocab_size"] = _vocabulary(header, arch, path)
    config["tie_word_embeddings"] = "output.weight" not in header.shapes
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = header.fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[key] = token
    if kind != "gpt2":
        config |= _attention(header, arch, kind, config)
        scaling = _scaling(header, arch, path)
        if scaling:
            config["rope_scaling"] = scaling
    return config


def _attention(header: Header, arch: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    fields, heads = header.fields, config["num_attention_heads"]
    head = fields.get(f"{arch}.attention.key_length") or (
        fields.get(f"{arch}.rope.dimension_count") if kind == "llama" else None
    )
    found: dict[str, Any] = {
        "num_key_value_heads": fields.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head or config["hidden_size"] // heads,
        "rope_theta": _short(fields.get(f"{arch}.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
    }
    if kind.startswith("gemma"):
        del found["hidden_act"]
        found["hidden_activation"] = "gelu_pytorch_tanh"
    if kind == "llama" and "blk.0.attn_q.bias" in header.shapes:
        found["attention_bias"] = True
    if kind == "gemma2":
        found["sliding_window"] = fields.get(f"{arch}.attention.sliding_window", 4096)
        found["attn_logit_softcapping"] = _short(fields.get(f"{arch}.attn_logit_softcapping", 50.0))
        found["final_logit_softcapping"] = _short(fields.get(f"{arch}.final_logit_softcapping", 30.0))
        # Not in the file: the 27B (46 blocks) scales queries by hidden / heads, its smaller sisters by the
        # head.
        big = config["num_hidden_layers"] == 46
        found["query_pre_attn_scalar"] = config["hidden_size"] // heads if big else found["head_dim"]
    return found


def _scaling(header: Header, arch: str, path: str | Path) -> dict[str, Any] | None:
    """Rotary scaling: written out for linear and yarn; Llama 3.1 and later store only the resulting factors.

    Llama 3's rule divides the low frequencies by `factor` and leaves the high ones; its other constants (1,
    4, 8192) are the same in every released model, so the largest stored factor gives the whole rule back.
    """
    fields = header.fields
    kind = fields.get(f"{arch}.rope.scaling.type")
    if kind in ("linear", "yarn"):
        scaling: dict[str, Any] = {
            "rope_type": kind,
            "factor": _short(fields.get(f"{arch}.rope.scaling.factor", 1.0)),
        }
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        if original:
            scaling["original_max_position_embeddings"] = original
        return scaling
    if arch == "llama" and "rope_freqs.weight" in header.shapes:
        factor = max(read_floats(path, header, "rope_freqs.weight"))
        if factor > 1:
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
    return None


def _vocabulary(header: Header, arch: str, path: str | Path) -> int:
    """Rows of the embedding itself: the list of tokens may be shorter than the matrix, which is padded."""
    if "token_embd.weight" in header.shapes:
        return header.shapes["token_embd.weight"][0]
    size = header.fields.get(f"{arch}.vocab_size") or header.fields.get("tokenizer.ggml.tokens#length")
    if not size:
        raise ModelError(f"model {path}", "a header without the size of its vocabulary")
    return int(size)


def _needed(header: Header, key: str, path: str | Path) -> Any:
    value = header.fields.get(key)
    if isinstance(value, list):  # one number a block: models with blocks of several widths
        if len(set(value)) != 1:
            raise ModelError(f"model {path}", f"'{key}' differs from block to block", "every block has one shape here")
        value = value[0]
    if value is None:
        raise ModelError(f"model {path}", f"a header without '{key}'", "the model's shapes need it")
    return value


def _short(value: float) -> float:
    """The shortest decimal that is this float32: the file stores 9.999999747e-06 where 1e-05 was meant."""
    exact = struct.pack("<f", value)
    for digits in range(1, 10):
        near = float(f"{value:.{digits}g}")
        if struct.pack("<f", near) == exact:
            return near
    return value
