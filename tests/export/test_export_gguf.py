"""A GGUF is the model: read back by two readers, tokens in llama.cpp's terms, what it cannot express refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skimp.core.errors import CheckpointError, ModelError
from skimp.export.gguf import differing, export_gguf
from skimp.export.gguf_tokenizer import splitting_rule
from skimp.export.rotary import llama3_factors, rotary_facts
from skimp.recipe.gguf_config import gguf_config
from skimp.recipe.gguf_header import read_header
from skimp.run.found import find
from skimp.run.gguf_tensors import gguf_name, halves, hf_name, interleaved
from skimp.run.opened import open_model

gguf = pytest.importorskip("gguf")
IDS = torch.tensor([[5, 17, 250, 3, 3, 90, 120]])
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def folder(make_tiny: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """`folder("qwen2", **config)`: a saved tiny model with the tiny tokenizer."""

    def build(family: str = "llama", **changes: Any) -> Path:
        model = make_tiny(family, vocab_size=320, **changes)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they begin at 0, where a wrong order would not show
                torch.nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(tiny_folder / name, tmp_path / family / name)
        return tmp_path / family

    return build


def logits(asked: str) -> torch.Tensor:
    with find(asked) as found:
        opened = open_model(found, "fp32")
    return opened.head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))


def export(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    with find(str(source)) as found:
        return export_gguf(found, target, **options)


CASES = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
    ("qwen2", {"tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_skimp_reads_back_the_very_model(
    folder: Callable[..., Path], tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source, target = folder(family, **changes), tmp_path / "out.gguf"
    facts = export(source, target)
    assert facts["largest_error"] == 0.0
    assert torch.equal(logits(str(target)), logits(str(source)))
    config = gguf_config(target)
    assert config["tie_word_embeddings"] == changes["tie_word_embeddings"]
    assert {k: config[k] for k in SIZES} == SIZES


@pytest.mark.parametrize(("family", "changes"), CASES[::2])
def test_transformers_reads_the_very_model(
    folder: Callable[..., Path], tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    source, target = folder(family, **changes), tmp_path / "out.gguf"
    export(source, target)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf").eval()
    own = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad():
        assert torch.equal(theirs(IDS).logits, own(IDS).logits)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0"])
def test_matrices_are_encoded_and_vectors_stay_float32(folder: Callable[..., Path], tmp_path: Path, dtype: str) -> None:
    source, target = folder("qwen2"), tmp_path / "out.gguf"
    facts = export(source, target, dtype=dtype)
    kinds = {t.name: (t.tensor_type.name, len(t.shape)) for t in gguf.GGUFReader(str(target)).tensors}
    assert {kind for kind, rank in kinds.values() if rank == 1} == {"F32"}
    assert {kind for kind, rank in kinds.values() if rank == 2} == {dtype.upper().replace("FP", "F")}
    assert 0 < facts["largest_error"] < 0.01
    torch.testing.assert_close(logits(str(target)), logits(str(source)), rtol=0.05, atol=0.02)


def test_rows_that_are_no_whole_blocks_fall_back_to_half_precision(folder: Callable[..., Path], tmp_path: Path) -> None:
    source, target = folder("llama", intermediate_size=72), tmp_path / "out.gguf"
    export(source, target, dtype="q8_0")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(str(target)).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_a_wrong_number_in_the_file_is_found() -> None:
    value = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for kind, right in (
        ("F32", value),
        ("F16", value.half().float()),
        ("BF16", value.bfloat16().float()),
        ("Q8_0", torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), gguf.GGMLQuantizationType.Q8_0),
                                                  gguf.GGMLQuantizationType.Q8_0))),
    ):  # fmt: skip
        assert differing(kind, value, right) == 0, kind
        wrong = right.clone()
        wrong[2, 5] += 0.05
        assert differing(kind, value, wrong) == 1, kind


def test_orders_and_names_are_inverse() -> None:
    weight = torch.arange(48.0).view(12, 4)
    assert torch.equal(halves(interleaved(weight, 2), 2), weight)
    assert interleaved(torch.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    for name in ("model.layers.11.self_attn.q_proj.bias", "model.embed_tokens.weight", "lm_head.weight"):
        assert hf_name(str(gguf_name(name))) == name
    assert gguf_name("model.layers.0.self_attn.rotary.inv_freq") is None


def test_tokens_merges_and_special_ids(folder: Callable[..., Path], tmp_path: Path) -> None:
    source, target = folder(), tmp_path / "out.gguf"
    (source / "chat_template.jinja").write_text("{{ messages }}")
    export(source, target)
    described = json.loads((source / "tokenizer.json").read_text())
    fields = {k: f.contents() for k, f in gguf.GGUFReader(str(target)).fields.items() if k.startswith("tokenizer")}
    vocabulary = described["model"]["vocab"]
    assert [fields["tokenizer.ggml.tokens"][i] for i in vocabulary.values()] == list(vocabulary)
    assert len(fields["tokenizer.ggml.tokens"]) == 320
    assert fields["tokenizer.ggml.tokens"][310] == "[PAD310]"
    assert fields["tokenizer.ggml.token_type"][310] == 5
    assert len(fields["tokenizer.ggml.merges"]) == len(described["model"]["merges"])
    assert fields["tokenizer.ggml.eos_token_id"] == 0
    assert fields["tokenizer.ggml.token_type"][0] == 3
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.chat_template"] == "{{ messages }}"


def test_a_ggufs_tokenizer_goes_back_as_it_was(folder: Callable[..., Path], tmp_path: Path) -> None:
    export(folder(), tmp_path / "a.gguf")
    export(tmp_path / "a.gguf", tmp_path / "b.gguf", dtype="bf16")
    a, b = (gguf.GGUFReader(str(tmp_path / f"{n}.gguf")).fields for n in "ab")
    keys = [k for k in a if k.startswith("tokenizer.")]
    assert keys
    assert all(a[k].contents() == b[k].contents() and a[k].types == b[k].types for k in keys)


def test_splitting_rules_are_recognised_and_never_guessed() -> None:
    level = {"type": "ByteLevel", "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    qwen = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": qwen}, "behavior": "Isolated"}
    bare = {"type": "ByteLevel", "use_regex": False}
    for rule, name in (
        (level, "gpt-2"),
        ({"type": "Sequence", "pretokenizers": [digits, level]}, "smollm"),
        ({"type": "Sequence", "pretokenizers": [split, bare]}, "qwen2"),
    ):
        assert splitting_rule({"pre_tokenizer": rule}) == name
    for unknown in (bare, None, {"type": "Sequence", "pretokenizers": [{**digits, "individual_digits": False}, level]}):
        with pytest.raises(ModelError, match=r"none of the rules[\s\S]*--pre NAME"):
            splitting_rule({"pre_tokenizer": unknown})


def test_llama3_factors_are_transformers_frequencies(make_tiny: Callable[..., Any], tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = make_tiny("llama", head_dim=64, rope_parameters=rope)
    plain = 500000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    expected = plain / model.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(llama3_factors(model.config, rope).double(), expected, rtol=1e-5, atol=1e-6)
    fields, factors = rotary_facts(model.config, "llama")
    assert fields == {"llama.rope.freq_base": 500000.0}
    assert factors is not None
    assert factors.max() == 8.0


def test_a_scaled_rotary_rule_survives(folder: Callable[..., Path], tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    source = folder("llama", rope_parameters=rope)
    export(source, tmp_path / "out.gguf")
    assert gguf_config(tmp_path / "out.gguf")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert torch.equal(logits(str(tmp_path / "out.gguf")), logits(str(source)))
    with pytest.raises(ModelError, match=r"kind 'dynamic'[\s\S]*--to merged"):
        export(folder("llama", rope_parameters={**rope, "rope_type": "dynamic"}), tmp_path / "d.gguf")


def test_what_gguf_cannot_express_is_refused_before_anything_is_written(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"model of type 'gpt2'[\s\S]*llama, mistral, qwen2, qwen3[\s\S]*--to merged"):
        export(folder("gpt2"), tmp_path / "out.gguf")
    source = folder("llama")
    with pytest.raises(ModelError, match=r"name ending in '\.bin'"):
        export(source, tmp_path / "out.bin")
    with pytest.raises(ModelError, match="did you mean 'q8_0'"):
        export(source, tmp_path / "out.gguf", dtype="q8")
    described = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps({**described, "pre_tokenizer": None}))
    with pytest.raises(ModelError, match=r"byte-level BPE"):
        export(source, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out*"))


def test_force_replaces_our_own_file_and_no_other(folder: Callable[..., Path], tmp_path: Path) -> None:
    source, target = folder(), tmp_path / "out.gguf"
    export(source, target)
    with pytest.raises(CheckpointError, match=r"earlier export[\s\S]*out-2\.gguf"):
        export(source, target)
    export(source, target, dtype="bf16", force=True)
    assert json.loads(read_header(target).fields["skimp.export"])["dtype"] == "bf16"
    target.write_bytes(b"somebody's")
    with pytest.raises(CheckpointError, match=r"no export of skimp's"):
        export(source, target, force=True)
    assert target.read_bytes() == b"somebody's"
