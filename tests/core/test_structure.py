"""Roles found in the module graph, on every tested family, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from skimp.core.errors import ModelError
from skimp.core.structure import TESTED_FAMILIES, layers_of, read_structure, trainable
from skimp.run.skeleton import skeleton

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f: {"model_type": f, **COMMON} for f in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2")},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "vocab_size": 50,
    },
    "opt": {
        "model_type": "opt",
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "vocab_size": 50,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": True,
    },
}


@pytest.mark.parametrize("family", TESTED_FAMILIES)
def test_every_tested_family_is_read(family: str) -> None:
    model = skeleton(CONFIGS[family], torch.float32)
    found = read_structure(model)
    assert (found.family, found.hidden, found.vocab, found.heads) == (family, 32, 50, 4)
    assert len(found.blocks) == 3
    assert found.positions == 64
    assert found.tied == (model.get_submodule(found.head).weight is model.get_submodule(found.embedding).weight)
    assert found.kv_heads == (4 if family in ("gpt2", "opt") else 2)
    block = model.get_submodule(found.blocks[0])
    matrices = {n for n, m in block.named_modules() if getattr(m, "weight", None) is not None}
    assert matrices == {n for names in found.roles.values() for n in names}
    assert all(model.get_submodule(f"{b}.{n}") is not None for b in found.blocks for n in matrices)
    assert found.block_of(f"{found.blocks[2]}.anything.weight") == 2
    assert found.block_of(found.embedding) is None


def test_roles_of_llama_and_gpt2_by_name() -> None:
    llama = read_structure(skeleton(CONFIGS["llama"], torch.float32))
    assert llama.roles == {
        "q": ("self_attn.q_proj",),
        "k": ("self_attn.k_proj",),
        "v": ("self_attn.v_proj",),
        "o": ("self_attn.o_proj",),
        "gate": ("mlp.gate_proj",),
        "up": ("mlp.up_proj",),
        "down": ("mlp.down_proj",),
        "norm": ("input_layernorm", "post_attention_layernorm"),
    }
    assert (llama.base, llama.embedding, llama.head) == ("model", "model.embed_tokens", "lm_head")
    gpt2 = read_structure(skeleton(CONFIGS["gpt2"], torch.float32))
    assert gpt2.roles["qkv"] == ("attn.c_attn",)
    assert gpt2.roles["c_proj"] == ("attn.c_proj", "mlp.c_proj")
    assert gpt2.tied


def test_block_names_do_not_match_by_prefix() -> None:
    found = read_structure(skeleton({**CONFIGS["llama"], "num_hidden_layers": 12}, torch.float32))
    assert found.block_of("model.layers.11.mlp.up_proj.weight") == 11
    assert found.block_of("model.layers.1.mlp.up_proj.weight") == 1


def test_softcap_and_logit_scale() -> None:
    assert read_structure(skeleton({**CONFIGS["gemma2"], "final_logit_softcapping": 15.0}, torch.float32)).softcap == 15
    cohere = {**COMMON, "model_type": "cohere", "logit_scale": 0.25}
    assert read_structure(skeleton(cohere, torch.float32)).logit_scale == 0.25
    granite = {**COMMON, "model_type": "granite", "logits_scaling": 8.0}
    assert read_structure(skeleton(granite, torch.float32)).logit_scale == 0.125


def test_tied_parameters_are_trained_once_and_frozen_ones_not() -> None:
    model = skeleton({**CONFIGS["llama"], "tie_word_embeddings": True}, torch.float32)
    model.get_submodule("model.norm").weight.requires_grad_(False)
    names = [n for n, _ in trainable(model)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "model.norm.weight" not in names
    assert len(names) == len(set(names)) == 1 + 3 * 9


def test_what_is_no_causal_language_model_is_refused_by_what_is_missing() -> None:
    with pytest.raises(ModelError, match=r"no a token embedding, no a linear output head|no a token embedding"):
        read_structure(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ModelError, match="keys hidden_size, model_type"):
        layers_of({"model_type": "strange", "hidden_size": 3})
    assert layers_of(CONFIGS["gpt2"]) == "n_layer"
    assert layers_of(CONFIGS["llama"]) == "num_hidden_layers"
