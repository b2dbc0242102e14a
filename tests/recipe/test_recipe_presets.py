"""Presets against published totals and against the real models, built without weights on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skimp.core.errors import ModelError
from skimp.recipe.catalogue import find_preset, presets, unknown_model
from skimp.recipe.families import FAMILIES, check_family, max_positions, parameter_count

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gpt2": 124_439_808,
}


def real_count(config: dict[str, Any]) -> int:
    """Parameters of the transformers model, storages counted once; 70 B of them take no memory on meta."""
    config = dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    return sum(p.numel() for p in model.parameters())


def test_published_totals() -> None:
    for name, total in PUBLISHED.items():
        assert presets()[name].parameters == total, name
        assert parameter_count(presets()[name].config) == total, name


@pytest.mark.parametrize("name", sorted(presets()))
def test_the_shapes_are_those_of_the_real_model(name: str) -> None:
    preset = presets()[name]
    # Blocks are alike: two of them and the count's linearity say as much as eighty, in a tenth of the time.
    key = "n_layer" if "n_layer" in preset.config else "num_hidden_layers"
    short = {**preset.config, key: 2}
    assert parameter_count(short) == real_count(short)
    assert parameter_count(preset.config) == preset.parameters
    three = parameter_count({**preset.config, key: 3})
    two = parameter_count(short)
    assert three is not None
    assert two is not None
    assert preset.parameters == two + (preset.config[key] - 2) * (three - two)


def test_one_preset_whole() -> None:
    assert real_count(presets()["smollm2-135m"].config) == 134_515_008


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"model_type": "llama", "head_dim": 24},
        {"model_type": "mistral", "tie_word_embeddings": False},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "attention_bias": True},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "gemma"},
        {"model_type": "gemma2", "head_dim": 20},
        {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 77, "n_inner": 100},
        {"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 77},
        {"model_type": "opt", "ffn_dim": 100, "max_position_embeddings": 77},
        {"model_type": "opt", "ffn_dim": 100, "max_position_embeddings": 77, "word_embed_proj_dim": 24},
        {"model_type": "opt", "ffn_dim": 100, "max_position_embeddings": 77, "do_layer_norm_before": False},
        {"model_type": "opt", "ffn_dim": 100, "max_position_embeddings": 77, "enable_bias": False},
    ],
)
def test_counts_of_every_family_with_odd_shapes(config: dict[str, Any]) -> None:
    sizes = {
        "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 131, "pad_token_id": 0,
    }  # fmt: skip
    both = {**({} if config["model_type"] == "gpt2" else sizes), "vocab_size": 131, **config}
    assert parameter_count(both) == real_count(both)


def test_names_are_unique_and_lower_case() -> None:
    seen: dict[str, str] = {}
    for preset in presets().values():
        assert preset.name == preset.name.lower()
        for spelling in {preset.name, *preset.aliases, preset.hub or preset.name}:
            assert seen.setdefault(spelling.lower(), preset.name) == preset.name
        assert preset.config["architectures"] == [FAMILIES[preset.config["model_type"]]]
        assert check_family(preset.config, preset.name) == preset.config["model_type"]
        assert max_positions(preset.config)


def test_spellings() -> None:
    for spelling in ("smollm2-135m", "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"):
        preset = find_preset(spelling)
        assert preset is not None
        assert preset.name == "smollm2-135m"
    galore = find_preset("llama_60m")
    assert galore is not None
    assert galore.parameters == 58_073_600
    assert find_preset("llama-4-9000b") is None
    assert "did you mean 'llama-3-8b'" in str(unknown_model("llama-3-8bb"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "a config without model_type"),
        ({"model_type": "llamma", "architectures": ["LlammaForCausalLM"]}, "unknown architecture 'llamma'"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "architectures BertForMaskedLM"),
        ({"model_type": "own", "auto_map": {"AutoModel": "x.Y"}}, "trust_remote_code is off and stays off"),
    ],
)
def test_what_is_no_causal_language_model(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_family(config, "somewhere")
    message = str(caught.value)
    assert said in message
    assert "llama, mistral, qwen2, qwen3, gemma, gemma2, gpt2, opt" in message
    if config.get("model_type") == "llamma":
        assert "did you mean 'llama'" in message


def test_a_type_only_transformers_knows_is_accepted() -> None:
    assert check_family({"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "x") == "phi3"
    assert parameter_count({"model_type": "phi3"}) is None
