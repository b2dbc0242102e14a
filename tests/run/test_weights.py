"""Weights come from files into storage that exists, tensor by tensor, under their right names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from skimp.core.coded_model import parameter_count
from skimp.core.errors import ModelError
from skimp.run.skeleton import materialise, skeleton
from skimp.run.weights import init_scratch, load_weights

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": True,
}  # fmt: skip


def empty(config: dict) -> torch.nn.Module:
    model = skeleton(config, torch.float32)
    materialise(model, torch.float32, lambda shape, dtype: torch.full(shape, float("nan"), dtype=dtype))
    return model


def test_safetensors_round_trip_and_progress(tmp_path: Path) -> None:
    source = empty(TINY)
    init_scratch(source, 3)
    save_file(dict(source.named_parameters()), tmp_path / "model.safetensors")
    target, seen = empty(TINY), []
    load_weights(target, tmp_path, lambda done, total: seen.append((done, total)))
    for (name, a), (_, b) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert seen[-1] == (len(list(source.parameters())),) * 2
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_base_model_names_get_their_prefix(tmp_path: Path) -> None:
    source = empty(TINY)
    init_scratch(source, 3)
    save_file(dict(source.model.named_parameters()), tmp_path / "model.safetensors")
    target = empty(TINY)
    load_weights(target, tmp_path)
    assert torch.equal(source.model.layers[1].mlp.down_proj.weight, target.model.layers[1].mlp.down_proj.weight)


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    source = empty(TINY)
    init_scratch(source, 3)
    tensors = dict(source.named_parameters())
    whole = dict(tensors)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing: model\.norm\.weight"):
        load_weights(empty(TINY), tmp_path)
    save_file({**whole, "model.norm.weight": torch.ones(31)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"weights of model\.norm\.weight[\s\S]*\(31,\)[\s\S]*\(32,\)"):
        load_weights(empty(TINY), tmp_path)


def test_scratch_depends_on_the_seed_only() -> None:
    torch.manual_seed(11)
    one, two, other = empty(TINY), empty(TINY), empty(TINY)
    init_scratch(one, 3)
    before = torch.random.get_rng_state()
    init_scratch(two, 3)
    init_scratch(other, 4)
    assert torch.equal(before, torch.random.get_rng_state())
    q = [m.model.layers[0].self_attn.q_proj.weight for m in (one, two, other)]
    assert torch.equal(q[0], q[1])
    assert not torch.equal(q[0], q[2])
    for name, parameter in one.named_parameters():
        assert torch.isfinite(parameter).all(), name
        expected = 1.0 if parameter.dim() == 1 else 0.0
        assert abs(parameter.mean() - expected) < 0.01, name


def test_an_architecture_nobody_knows_is_named() -> None:
    with pytest.raises(ModelError, match=r"lama[\s\S]*llama"):
        skeleton({"model_type": "lama"}, torch.float32)


def test_structure_costs_no_memory() -> None:
    model = skeleton({**TINY, "hidden_size": 8192, "vocab_size": 100_000, "num_hidden_layers": 4}, torch.float32)
    assert all(p.device.type == "meta" for p in model.parameters())
    assert parameter_count(model) > 10**9


@pytest.mark.slow
def test_gguf_equals_what_transformers_loads(smollm2_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from skimp.recipe import fetch_model, resolve_model

    source = fetch_model(resolve_model("smollm2-135m"))
    ours = empty(source.config)
    load_weights(ours, Path(source.weights))
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    reference = dict(theirs.named_parameters())
    assert parameter_count(ours) == 134_515_008
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, reference[name].float()), name
