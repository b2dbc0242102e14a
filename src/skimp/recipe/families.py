"""The architectures skimp knows by their config: which they are, how many parameters they have, how far
they see.

The counts are the shapes written out, so they need neither torch nor transformers; tests hold them against
the real models built on the meta device.
"""

from __future__ import annotations

from typing import Any

from skimp.core.errors import ModelError, did_you_mean

#: model_type of config.json -> the class in `architectures`.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}

#: Families whose token embedding is also their head unless the config says otherwise, as in transformers'
#: own defaults.
_TIED = {"gemma", "gemma2", "gpt2", "opt"}


def check_family(config: dict[str, Any], origin: str) -> str:
    """The model_type of a causal language model.

    Families beside the table are accepted when the installed transformers has a causal language model of
    that type.

    Raises:
        ModelError: no model_type; code of its own is needed; not a causal language model; or nobody knows
            the type.
    """
    kind = config.get("model_type")
    classes = config.get("architectures") or []
    named = ", ".join(classes) or "not given"
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"model {origin}", "a config without model_type", instead=f"one of {', '.join(FAMILIES)}")
    if classes and not any(c.endswith(("ForCausalLM", "LMHeadModel")) for c in classes):
        raise ModelError(
            f"model {origin}",
            f"architectures {named}",
            "it is not a causal language model",
            f"families known: {', '.join(FAMILIES)}",
        )
    if kind in FAMILIES:
        return kind
    if config.get("auto_map"):
        raise ModelError(
            f"model {origin}",
            f"model_type '{kind}' with code of its own (auto_map)",
            "trust_remote_code is off and stays off: the code would run here, and its memory could not be planned",
            f"families known: {', '.join(FAMILIES)}",
        )
    # Only now, for a type outside the table: transformers' list costs a second and imports torch.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as theirs

    if kind not in theirs:
        near = did_you_mean(kind, FAMILIES)
        raise ModelError(
            f"model {origin}",
            f"unknown architecture '{kind}' (architectures: {named})",
            "neither skimp nor the installed transformers knows a causal language model of that type",
            [*([near] if near.startswith("did") else []), f"families known: {', '.join(FAMILIES)}"],
        )
    return kind


def parameter_count(config: dict[str, Any]) -> int | None:
    """Parameters of the model a config describes, tied weights counted once; None outside `FAMILIES`."""
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config)
    if kind == "opt":
        return _opt(config)
    return _rotary(config) if kind in FAMILIES else None


def tied(config: dict[str, Any]) -> bool:
    """Whether head and token embedding are one matrix."""
    return bool(config.get("tie_word_embeddings", config.get("model_type") in _TIED))


def max_positions(config: dict[str, Any]) -> int | None:
    """The longest sequence the config declares, in tokens; None when it declares none."""
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        if config.get(key):
            return int(config[key])
    return None


def learned_positions(config: dict[str, Any]) -> bool:
    """Whether positions are rows of a table, so that a longer sequence has no row to read."""
    return config.get("model_type") in ("gpt2", "opt")


def layer_count(config: dict[str, Any]) -> int | None:
    """Blocks of the model; None when the config does not say."""
    for key in ("num_hidden_layers", "n_layer"):
        if config.get(key):
            return int(config[key])
    return None


def _rotary(config: dict[str, Any]) -> int:
    """Llama and its relatives: attention q, k, v, o; a gated MLP of three matrices; norms without bias."""
    kind = config["model_type"]
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or (128 if kind == "qwen3" else 256 if kind.startswith("gemma") else hidden // heads)
    q, kv = heads * head, kv_heads * head
    attention = 2 * hidden * q + 2 * hidden * kv
    if kind == "qwen2":  # biases on q, k and v, none on o
        attention += q + 2 * kv
    elif kind != "mistral" and config.get("attention_bias"):
        attention += q + 2 * kv + hidden
    if kind == "qwen3":  # a norm over each head's query and key
        attention += 2 * head
    mlp = 3 * hidden * inner
    if kind == "llama" and config.get("mlp_bias"):
        mlp += 2 * inner + hidden
    norms = (4 if kind == "gemma2" else 2) * hidden  # Gemma 2 norms before and after each half of a block
    embedding = config["vocab_size"] * hidden
    return layers * (attention + mlp + norms) + hidden + embedding * (1 if tied(config) else 2)


def _gpt2(config: dict[str, Any]) -> int:
    hidden = config["n_embd"]
    inner = config.get("n_inner") or 4 * hidden
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    embedding = config["vocab_size"] * hidden
    positions = config["n_positions"] * hidden
    return int(config["n_layer"] * block + 2 * hidden + positions + embedding * (1 if tied(config) else 2))


def _opt(config: dict[str, Any]) -> int:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    word = config.get("word_embed_proj_dim") or hidden
    bias = 1 if config.get("enable_bias", True) else 0
    affine = 2 * hidden if config.get("layer_norm_elementwise_affine", True) else 0
    block = 4 * hidden * hidden + 2 * hidden * inner + bias * (4 * hidden + inner + hidden) + 2 * affine
    # Two position rows more than the sequence: transformers' OPT keeps fairseq's offset of two.
    positions = (config["max_position_embeddings"] + 2) * hidden
    final = affine if config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm") else 0
    project = 2 * word * hidden if word != hidden else 0
    embedding = config["vocab_size"] * word
    return int(
        config["num_hidden_layers"] * block + positions + final + project + embedding * (1 if tied(config) else 2)
    )
