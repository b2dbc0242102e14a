"""A base in a codec from a recipe: loaded tensor by tensor, planned, trained, resumed, read again and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from session_cases import Heard, lines, merged
from transformers import AutoModelForCausalLM

import skimp
from skimp.core.codecs import NF4
from skimp.core.coded_linear import CodedLinear, coded_layers
from skimp.core.coded_model import encode_model, parameter_count
from skimp.core.errors import ConflictError, RecipeError, SkimpError
from skimp.core.memory.tracker import Tracker
from skimp.core.structure import read_structure
from skimp.export.loss_change import loss_change, sentence
from skimp.export.merged import export_merged
from skimp.run.base import fingerprint
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.evaluation import choose_way, score
from skimp.run.found import find
from skimp.run.held_out import held_out
from skimp.run.opened import open_model
from skimp.run.skeleton import materialise, skeleton
from skimp.run.weights import init_scratch, load_weights

pytestmark = pytest.mark.usefixtures("plan_once")

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}


def empty(config: dict[str, Any], codec: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    model = skeleton(dict(config), dtype)
    if codec is not None:
        encode_model(model, read_structure(model), codec)
    materialise(model, dtype, lambda shape, kind: torch.empty(shape, dtype=kind))
    return model


def dense_of(model: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": module.weight.dense().t() if module.stored_transposed else module.weight.dense()
        for name, module in coded_layers(model)
    }


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_loaded_from_files_is_the_dense_one_coded(config: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    plain = empty(config, dtype=dtype)
    init_scratch(plain, 3)
    save_file({n: p.detach() for n, p in plain.named_parameters()}, tmp_path / "model.safetensors")
    model = empty(config, NF4(), dtype)
    load_weights(model, tmp_path)
    encoded = dense_of(model)
    for name, parameter in plain.named_parameters():
        if name in encoded:
            stored = parameter.t() if "gpt2" in str(config) else parameter
            codec = NF4()
            seen = codec.decode(codec.encode(stored), stored.shape, dtype)
            assert torch.equal(encoded[name], seen.t() if "gpt2" in str(config) else seen), name
        else:
            assert torch.equal(model.get_parameter(name), parameter), name
    assert len(encoded) == {"llama": 21, "gpt2": 8}[config["model_type"]]
    assert parameter_count(model) == sum(p.numel() for p in plain.parameters())
    # The base is the same base, however it is kept: an adapter says so.
    assert fingerprint(model) == fingerprint(plain)


def test_embeddings_head_norms_and_biases_keep_their_precision() -> None:
    model = empty({**CONFIG, "model_type": "qwen2", "tie_word_embeddings": False}, NF4())
    kept = {n for n, _ in model.named_parameters()}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= kept
    assert "model.layers.0.self_attn.q_proj.bias" in kept
    assert not any(n.endswith("proj.weight") for n in kept)
    assert not isinstance(model.lm_head, CodedLinear)


def test_loading_peaks_at_the_result_and_one_layer(tmp_path: Path) -> None:
    plain = empty(CONFIG)
    init_scratch(plain, 3)
    save_file({n: p.detach() for n, p in plain.named_parameters()}, tmp_path / "model.safetensors")
    dense = sum(p.nbytes for p in plain.parameters())
    del plain
    NF4().encode(torch.zeros(64))  # its tables are made once for all layers
    tracker, model = Tracker(), skeleton(dict(CONFIG), torch.float32)
    encode_model(model, read_structure(model), NF4())
    with tracker:
        materialise(model, torch.float32, lambda shape, kind: torch.empty(shape, dtype=kind))
        load_weights(model, tmp_path)
        result = tracker.live
    layer = 512 * 256 * 4
    parts = [part for _, module in coded_layers(model) for part in module.parts().values()]
    assert result == sum(t.nbytes for t in [*model.parameters(), *parts])
    assert result < 0.2 * dense
    # The layer, its new parts, and a chunk of the encoder's own.
    assert tracker.peak.total <= result + 1.2 * layer + 8 * 2**16 * 4


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_a_model_with_its_weights_is_coded_in_place_layer_by_layer(config: dict[str, Any]) -> None:
    model, plain = empty(config), empty(config)
    init_scratch(model, 3)
    init_scratch(plain, 3)
    names = encode_model(model, read_structure(model), NF4())
    drawn = empty(config, NF4())
    init_scratch(drawn, 3)
    assert [name for name, _ in coded_layers(model)] == names
    for name, value in dense_of(drawn).items():
        assert torch.equal(dense_of(model)[name], value)
    ids = torch.arange(1, 12).unsqueeze(0)
    assert torch.equal(model(input_ids=ids).logits, drawn(input_ids=ids).logits)
    expected = plain(input_ids=ids).logits.detach()
    gap = (model(input_ids=ids).logits.detach() - expected).norm() / expected.norm()
    assert 0 < float(gap) < 0.2
    with pytest.raises(SkimpError, match="none below the head"):
        encode_model(torch.nn.Sequential(torch.nn.ReLU()), read_structure(plain), NF4())


def test_a_weight_that_is_not_finite_is_refused_by_name() -> None:
    model = empty(CONFIG)
    init_scratch(model, 0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(SkimpError, match=r"layers\.1\.mlp\.up_proj\.weight in codec 'nf4'[\s\S]*NaN"):
        encode_model(model, read_structure(model), NF4())


# ---- whole sessions


def start(recipe: dict[str, Any], folder: Path, voice: Any = None, resume: bool = False, **changes: Any) -> Any:
    own = {"adapter": {"r": 4}, "model": {"name": str(folder), "weights": "nf4"}}
    own |= {key: changes.pop(key) for key in own if key in changes}
    return skimp.train(merged({**recipe, **own}, changes), resume=resume, voice=voice)


def test_qlora_trains_resumes_to_the_bit_and_is_read_again(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    voice = Heard()
    whole = start(recipe, tiny_folder, voice, output=str(tmp_path / "whole"))
    told = "\n".join(voice.said)
    assert "base: 14 linear layers in nf4" in told
    assert "bits each" in told
    start(recipe, tiny_folder, Heard(stop_at=3))
    outcome = start(recipe, tiny_folder, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    found, expected = (load(latest(o.folder / "checkpoints")) for o in (outcome, whole))
    for name in expected.names("adapter"):
        assert torch.equal(found.read("adapter", name), expected.read("adapter", name))
    # The dense base's own fingerprint, and the loss that training ended with.
    assert expected.meta["base"] == fingerprint(AutoModelForCausalLM.from_pretrained(tiny_folder))
    with find(str(whole.folder)) as again:
        text = held_out(again, [])
        way = choose_way(again, torch.float32, text.seq_len, None)
        opened = open_model(again)
    (rows,) = text.sets.values()
    scored = score(opened, rows, "", way, 256 // text.seq_len)
    assert scored.loss == pytest.approx(whole.summary["eval_loss_after"], abs=1e-5)


def test_a_merged_export_is_what_training_saw_or_the_original_weights(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    outcome = start(recipe, tiny_folder)
    ids = torch.arange(1, 20).unsqueeze(0)
    logits = {}
    for onto in ("dequantised", "original"):
        with find(str(outcome.folder)) as found:
            found.stored.onto(onto)
            export_merged(found, tmp_path / onto)
            facts = loss_change(found, tmp_path / onto, onto)
            with pytest.raises(ConflictError, match="--onto original"):
                found.stored.onto("4-bit")
        assert abs(facts["change"]) < 1e-5 if onto == "dequantised" else abs(facts["change"]) > 1e-5
        assert f"({facts['change']:+.4f})" in sentence(facts)
        with torch.no_grad():
            logits[onto] = AutoModelForCausalLM.from_pretrained(tmp_path / onto)(ids).logits
    with find(str(outcome.folder)) as found:
        opened = open_model(found)
    seen = opened.head.logits_of(ids, torch.arange(19).unsqueeze(0))
    torch.testing.assert_close(logits["dequantised"], seen.view_as(logits["original"]), atol=1e-5, rtol=1e-5)
    assert (logits["original"] - logits["dequantised"]).abs().max() > 1e-3


def test_a_merge_in_place_is_refused_with_both_ways_out() -> None:
    from skimp.adapters.lora import LoRA

    model = empty(CONFIG, NF4())
    init_scratch(model, 0)
    lora = LoRA(model)
    with pytest.raises(ConflictError, match=r"--onto dequantised[\s\S]*--onto original"):
        lora.merge()
    before = {n: b.clone() for n, b in model.named_buffers()}
    lora.detach()
    assert not any(n.endswith("lora_A") for n, _ in model.named_parameters())
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


@pytest.mark.parametrize(
    ("model", "adapter", "said"),
    [
        ({"weights": "nf4"}, None, r"an adapter beside it[\s\S]*adapter=lora"),
        ({"weights": "nf5"}, "lora", r"did you mean 'nf4'"),
        ({"weights": {"name": "nf4", "blocks": 64}}, "lora", r"model\.weights\.blocks[\s\S]*did you mean 'block'"),
        ({"weights": {"name": "nf4", "block": 48}}, "lora", r"power of two"),
        ({"weights": {"name": "int4", "group": 7}}, "lora", r"even number"),
        ({"weights": {"name": "sketch", "bits": 3}}, "lora", r"three do not fill a byte"),
        ({"weights": {"name": "nf4", "double_quant": 3}}, "lora", r"true or false"),
        ({"weights": "dynamic8"}, "lora", r"a codec of frozen weights"),
    ],
)
def test_bad_codecs_are_refused(recipe: dict[str, Any], tiny_folder: Path, model: Any, adapter: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        start(recipe, tiny_folder, model={"name": str(tiny_folder), **model}, adapter=adapter)
