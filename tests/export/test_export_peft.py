"""Adapters to PEFT and from it, held against PEFT itself in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft_child import IDS, logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.core.errors import CheckpointError, ModelError
from skimp.core.structure import read_structure
from skimp.export.peft import CONFIG, TENSORS, check_base, load_peft, read_spec, write_peft

CHILD = Path(__file__).with_name("peft_child.py")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: pip install 'skimp[hf]'")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft(what: str, base: Path, folder: Path, out: Path, **options: Any) -> dict[str, Tensor]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), what, str(base), str(folder), str(out), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Tensor] = torch.load(out, weights_only=True)
    return found


def base(tmp: Path, family: str = "llama", tied: bool = False) -> Path:
    """A tiny base on disk."""
    common: dict[str, Any] = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": tied}
    torch.manual_seed(1)
    if family == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **common)
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64, **common)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp / "base")
    return tmp / "base"


def opened(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def moved(lora: LoRA) -> LoRA:
    """As after training: nothing is zero any more."""
    for index, (name, parameter) in enumerate(lora.named_parameters()):
        if not name.endswith("lora_A"):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            with torch.no_grad():
                parameter.add_(0.05 * noise)
    return lora


CASES: dict[str, tuple[str, bool, Spec]] = {
    "all-linear": ("llama", False, Spec(r=4)),
    "rslora-some": ("llama", False, Spec(r=9, alpha=6.0, scale="rslora", targets=("q_proj", "down_proj"))),
    "gpt2-transposed": ("gpt2", True, Spec(r=4)),
    "full-head": ("llama", False, Spec(r=2, head=True, embeddings=True)),
    "tied-embedding": ("llama", True, Spec(r=2, embeddings=True)),
    "one-layer": ("llama", False, Spec(r=2, targets=("1.self_attn.q_proj",))),
    "own-ranks": (
        "llama",
        False,
        Spec(r=2, alpha=4.0, targets=("q_proj",), ranks={"model.layers.1.self_attn.q_proj": (5, 20.0)}),
    ),
}
FAST = ("gpt2-transposed", "tied-embedding", "own-ranks")
#: Additions that began from the base, or scale its rows.
PARTS: dict[str, tuple[str, bool, Spec]] = {
    "olora-rslora": ("llama", False, Spec(r=4, alpha=6.0, init="olora", scale="rslora")),
    "pissa-own-ranks": (
        "gpt2",
        True,
        Spec(r=2, alpha=4.0, init="pissa", targets=("c_attn",), ranks={"transformer.h.1.attn.c_attn": (5, 20.0)}),
    ),
    "dora": ("llama", False, Spec(r=4, reparam="dora")),
    "gradnormlorp-on-olora": ("gpt2", True, Spec(r=4, reparam="weightnorm", init="olora")),
}


@needs_peft
@pytest.mark.parametrize(
    "name",
    [n if n in (*FAST, *PARTS) else pytest.param(n, marks=pytest.mark.slow) for n in (*CASES, *PARTS)],
)
def test_peft_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    family, tied, spec = (CASES | PARTS)[name]
    folder = base(tmp_path, family, tied)
    model = opened(folder)
    lora = moved(LoRA(model, spec))
    write_peft(tmp_path / "adapter", lora, base_name=str(folder))
    found = peft("load", folder, tmp_path / "adapter", tmp_path / "out.pt")
    expected = logits(model)
    assert (expected - found["base"]).abs().max() > 1e-3
    torch.testing.assert_close(found["adapter"], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["merged"], expected, rtol=0, atol=1e-5)


@needs_peft
@pytest.mark.parametrize(
    "options",
    [
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
        pytest.param({"r": 2, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}, marks=pytest.mark.slow),
        {
            "r": 2,
            "target_modules": LAYERS,
            "rank_pattern": {"up_proj": 5},
            "alpha_pattern": {"1.mlp.up_proj": 3},
            "exclude_modules": ["k_proj"],
            "layers_to_transform": [1],
        },
    ],
)
def test_what_peft_saved_gives_its_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = base(tmp_path)
    made = peft("make", folder, tmp_path / "adapter", tmp_path / "out.pt", **options)
    model = opened(folder)
    structure = read_structure(model)
    spec = read_spec(tmp_path / "adapter", model, structure, dropout=0.0, seed=0, full=(False, False))
    lora = LoRA(model, spec, structure)
    load_peft(tmp_path / "adapter", lora)
    torch.testing.assert_close(logits(model), made["adapter"], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- without PEFT
def again(folder: Path, adapter: Path) -> LoRA:
    model = opened(folder)
    structure = read_structure(model)
    spec = read_spec(adapter, model, structure, dropout=0.0, seed=0, full=(False, False))
    lora = LoRA(model, spec, structure)
    load_peft(adapter, lora)
    return lora


@pytest.mark.parametrize("name", CASES)
def test_written_and_read_again_is_the_same_to_the_bit(tmp_path: Path, name: str) -> None:
    family, tied, spec = CASES[name]
    folder = base(tmp_path, family, tied)
    lora = moved(LoRA(opened(folder), spec))
    config = write_peft(tmp_path / "adapter", lora, base_name="owner/name", base="0123")
    found = again(folder, tmp_path / "adapter")
    assert dict(found.scale) == pytest.approx(dict(lora.scale))
    assert found.full == lora.full
    expected = dict(lora.named_parameters())
    assert dict.fromkeys(expected, True) == {n: torch.equal(p, expected[n]) for n, p in found.named_parameters()}
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text()) == config
    assert torch.equal(logits(found.model), logits(lora.model))


def test_the_names_are_peft_s_own(tmp_path: Path) -> None:
    folder = base(tmp_path, tied=True)
    lora = LoRA(opened(folder), Spec(r=2, targets=("q_proj",), embeddings=True))
    config = write_peft(tmp_path / "adapter", lora, base_name="owner/name")
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    expected = {stem.format(i, part) for i in (0, 1) for part in "AB"}
    expected |= {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"}
    assert set(load_file(tmp_path / "adapter" / TENSORS)) == expected
    assert config["target_modules"] == ["q_proj"]
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert (config["peft_type"], config["r"], config["init_lora_weights"]) == ("LORA", 2, True)


def test_nothing_is_overwritten_and_nothing_merged_is_written(tmp_path: Path) -> None:
    lora = LoRA(opened(base(tmp_path)), Spec(r=2))
    write_peft(tmp_path / "adapter", lora, base_name="x")
    with pytest.raises(CheckpointError, match="another folder"):
        write_peft(tmp_path / "adapter", lora, base_name="x")
    lora.merge()
    with pytest.raises(CheckpointError, match="unmerge"):
        write_peft(tmp_path / "other", lora, base_name="x")


def test_the_fingerprint_of_another_base_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path / "a", LoRA(opened(base(tmp_path)), Spec(r=2)), base_name="owner/name", base="0123")
    check_base(tmp_path / "a", "0123", torch.float32)
    check_base(tmp_path / "a", "4567", torch.bfloat16)  # the same base rounded has other bytes: not known
    with pytest.raises(ModelError, match=r"fingerprint 0123[\s\S]*another base[\s\S]*owner/name"):
        check_base(tmp_path / "a", "4567", torch.float32)


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, r"peft_type IA3[\s\S]*merge it with PEFT"),
        ({"use_qalora": True}, r"use_qalora True"),
        ({"bias": "all"}, r"bias 'all'"),
        ({"init_lora_weights": "pissa_niter_16"}, r"changed base[\s\S]*path_initial_model_for_weight_conversion"),
    ],
)
def test_another_kind_of_adapter_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = base(tmp_path)
    write_peft(tmp_path / "a", LoRA(opened(folder), Spec(r=2)), base_name="x")
    edited(tmp_path / "a", **changes)
    with pytest.raises(ModelError, match=said):
        again(folder, tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", (2, 32), r"layers\.7[\s\S]*no such linear"),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_A.weight", (2, 64), r"\(2, 64\)[\s\S]*needs \(2, 32\)"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (2, 97), r"lora_embedding_A[\s\S]*embeddings=true"),
        ("base_model.model.lm_head.weight", (98, 32), r"\(98, 32\)[\s\S]*another base"),
    ],
)
def test_an_adapter_for_another_base_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...], said: str) -> None:
    folder = base(tmp_path)
    write_peft(tmp_path / "a", LoRA(opened(folder), Spec(r=2)), base_name="owner/name")
    tensors = load_file(tmp_path / "a" / TENSORS)
    save_file({**tensors, name: torch.zeros(shape)}, tmp_path / "a" / TENSORS)
    with pytest.raises(ModelError, match=said):
        again(folder, tmp_path / "a")


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    folder = base(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        again(folder, tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        again(folder, folder)
    write_peft(tmp_path / "a", LoRA(opened(folder), Spec(r=2)), base_name="x")
    (tmp_path / "a" / TENSORS).rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"only adapter_model\.bin[\s\S]*run code"):
        again(folder, tmp_path / "a")


def test_halves_of_a_tied_matrix_that_were_trained_apart_are_refused(tmp_path: Path) -> None:
    folder = base(tmp_path, tied=True)
    write_peft(tmp_path / "a", LoRA(opened(folder), Spec(r=2, embeddings=True)), base_name="x")
    tensors = load_file(tmp_path / "a" / TENSORS)
    tensors["base_model.model.lm_head.weight"].add_(1.0)
    save_file(tensors, tmp_path / "a" / TENSORS)
    with pytest.raises(ModelError, match=r"trained apart[\s\S]*tie_word_embeddings=false"):
        again(folder, tmp_path / "a")


def test_the_ids_are_the_child_s() -> None:
    assert IDS.shape == (2, 20)


@pytest.mark.parametrize("name", PARTS)
def test_what_began_from_the_base_is_written_on_the_original_one(tmp_path: Path, name: str) -> None:
    """s (B A - B0 A0) as one product of rank 2r at the same s: read again as a plain addition it gives the logits."""
    family, tied, spec = PARTS[name]
    folder = base(tmp_path, family, tied)
    lora = moved(LoRA(opened(folder), spec))
    config = write_peft(tmp_path / "adapter", lora, base_name="owner/name")
    found = again(folder, tmp_path / "adapter")
    wide = 1 if spec.init == "kaiming" else 2
    assert (config["r"], config["init_lora_weights"]) == (wide * spec.r, True)
    root = wide**0.5 if spec.scale == "rslora" else wide
    assert config["lora_alpha"] == pytest.approx(root * spec.alpha)
    assert dict(found.scale) == pytest.approx(dict(lora.scale))
    assert config["use_dora"] == (spec.reparam != "plain") == (found.spec.reparam == "dora")
    torch.testing.assert_close(logits(found.model), logits(lora.model), rtol=0, atol=1e-5)
