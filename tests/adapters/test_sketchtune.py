"""Trained codebooks on a model: the handle from attach to detach, what trains, merged and saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from skimp.adapters import LoRA, SketchTune, Spec, attach_folder, save_folder
from skimp.adapters.sketch_saved import SHIFT, Grids
from skimp.core.codecs import NF4, Sketch
from skimp.core.coded_linear import coded_layers
from skimp.core.coded_model import encode_model
from skimp.core.errors import CheckpointError, ConflictError, ModelError, SkimpError
from skimp.core.structure import read_structure

SIZES = {"hidden_size": 64, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(2, 42).view(2, 20)


def model(kind: str = "llama", codec: Any = None) -> Any:
    torch.manual_seed(3)
    made: Any = (
        LlamaForCausalLM(LlamaConfig(vocab_size=97, **SIZES))
        if kind == "llama"
        else GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=64, vocab_size=61))
    )
    encode_model(made, read_structure(made), codec or Sketch(4, 2))
    return made.eval()


def logits(of: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = of(input_ids=IDS).logits
    return out


def trained(of: Any, steps: int = 3, lr: float = 1e-3, **options: Any) -> SketchTune:
    tuned = SketchTune(of, **options)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        of(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuned


def state(of: Any) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in of.state_dict().items()}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_attached_it_is_the_base_and_detached_too_to_the_bit(kind: str) -> None:
    base = model(kind)
    before, first = state(base), logits(base)
    tuned = trained(base, steps=0)
    assert torch.equal(logits(base), first)
    assert {n for n, p in base.named_parameters() if p.requires_grad} == {n for n, _ in tuned.named_parameters()}
    layers = dict(coded_layers(base))
    expected = sum(m.out_features * 2 * 16 for m in layers.values())
    assert sum(p.numel() for p in tuned.parameters()) == sum(row.parameters for row in tuned.table()) == expected
    assert sum(row.bytes for row in tuned.table()) == 4 * expected
    tuned.detach()
    tuned = trained(base)
    assert (logits(base) - first).abs().max() > 1e-3
    tuned.detach()
    after = state(base)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert torch.equal(logits(base), first)
    assert all(p.requires_grad for n, p in base.named_parameters() if "embed" in n or "wte" in n)


def test_training_lowers_the_loss_at_two_bits_without_nan() -> None:
    base = model(codec=Sketch(2, 4))
    first = float(base(input_ids=IDS, labels=IDS).loss.detach())
    trained(base, steps=60, lr=3e-3)
    last = float(base(input_ids=IDS, labels=IDS).loss.detach())
    assert last < 0.8 * first


def test_a_trained_change_has_a_rank_that_lora_has_not() -> None:
    base = model()
    name, layer = next(iter(coded_layers(base)))
    before = layer.weight.dense()
    tuned = trained(base)
    assert tuned.merge(keep=True).change > 0
    change = layer.weight.dense() - before
    assert torch.linalg.matrix_rank(change) > 32, name


def test_merged_is_a_sketch_as_large_as_before_and_unmerged_to_the_bit() -> None:
    base = model()
    before = state(base)
    tuned = trained(base)
    live = logits(base)
    report = tuned.merge(keep=True, probe=lambda: logits(base))
    assert report.modules == 14
    assert report.logits is not None
    # float16 grids: half a unit in the last place of a weight below 0.25 is 6e-5.
    assert 0 < report.rounding < 6.2e-5
    assert report.logits < 5e-3 < (live - logits(base)).abs().max() + 5e-3
    assert {n: t.nbytes for n, t in base.named_buffers() if "grid" in n} == {
        n: t.nbytes for n, t in before.items() if "grid" in n
    }
    with pytest.raises(ConflictError, match="merged already"):
        tuned.merge()
    tuned.unmerge()
    assert torch.equal(logits(base), live)
    tuned.merge()
    with pytest.raises(ConflictError, match="without keeping"):
        tuned.detach()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_of_a_saved_adapter_are_those_that_training_saw(kind: str) -> None:
    base = model(kind)
    tuned = trained(base)
    saved = {n: t.clone() for n, t in tuned.named_state()}
    grids = SketchTune.merging(tuned.meta(), frozenset(saved), saved.__getitem__)
    assert isinstance(grids, Grids)
    for name, layer in coded_layers(base):
        eye = torch.eye(layer.in_features)
        bias = 0 if layer.bias is None else layer.bias
        seen = (layer(eye) - bias).t().detach()
        torch.testing.assert_close(grids.of_codes(f"{name}.weight", layer.weight, None), seen, rtol=0, atol=1e-6)
        original = torch.ones(layer.weight.shape)
        onto = grids.of_codes(f"{name}.weight", layer.weight, original)
        torch.testing.assert_close(onto - 1, seen - layer.weight.dense(), rtol=0, atol=1e-6)
    name, layer = next(iter(coded_layers(model(kind, Sketch(4, 3)))))
    with pytest.raises(CheckpointError, match=r"checksum[\s\S]*trained on"):
        grids.of_codes(f"{name}.weight", layer.weight, None)


def test_a_saved_adapter_goes_on_the_same_base_in_a_new_process_and_on_no_other(tmp_path: Path) -> None:
    base, folder = model(), tmp_path / "task"
    tuned = trained(base)
    save_folder(folder, tuned, "tiny")
    written = (folder / "adapter.safetensors").stat().st_size
    assert written < 4 * sum(p.numel() for p in tuned.parameters()) + 8192
    torch.save(logits(base), tmp_path / "logits.pt")
    lines = [
        "import sys, torch, test_sketchtune as t",
        "from skimp.adapters import attach_folder",
        "base = t.model()",
        "attach_folder(sys.argv[1], base)",
        "assert torch.equal(t.logits(base), torch.load(sys.argv[2]))",
    ]
    command = [sys.executable, "-c", "\n".join(lines), str(folder), str(tmp_path / "logits.pt")]
    subprocess.run(command, check=True, cwd=Path(__file__).parent)
    with pytest.raises(SkimpError, match="shape"):
        attach_folder(folder, model(codec=Sketch(4, 1)))
    other = model()
    layer = next(m for _, m in coded_layers(other))
    layer.take(torch.randn(layer.weight.shape))
    with pytest.raises(CheckpointError, match="other codes they are other weights"):
        attach_folder(folder, other)
    with pytest.raises(ModelError, match="another model's adapter"):
        attach_folder(folder, model("gpt2"))


def test_what_cannot_be_is_refused_and_the_model_stays() -> None:
    base = model(codec=NF4())
    with pytest.raises(ConflictError, match=r"kept in nf4[\s\S]*model\.weights=sketch"):
        SketchTune(base)
    torch.manual_seed(3)
    dense: Any = LlamaForCausalLM(LlamaConfig(vocab_size=97, **SIZES))
    with pytest.raises(ConflictError, match="no codec"):
        SketchTune(dense)
    sketched = model()
    with pytest.raises(SkimpError, match="did you mean 'q_proj'"):
        SketchTune(sketched, targets=("q_porj",))
    SketchTune(sketched)
    with pytest.raises(ConflictError, match="one addition a layer"):
        LoRA(sketched, Spec(r=4))
    with pytest.raises(ConflictError, match="has an adapter"):
        SketchTune(sketched)
    with pytest.raises(ConflictError, match=r"PEFT[\s\S]*--to merged"):
        next(iter([SketchTune(model())])).peft("tiny")


def test_targets_choose_layers_and_others_stay_frozen_sketches() -> None:
    base = model()
    tuned = trained(base, targets=("q_proj", "down_proj"))
    names = [n for n, _ in tuned.named_parameters()]
    assert len(names) == 4
    assert all(n.endswith(SHIFT) for n in names)
    assert tuned.meta()["codes"].keys() == tuned.modules.keys()
    again = SketchTune.rebuild(model(), read_structure(base), tuned.meta())
    again.load(dict(tuned.named_state()).__getitem__)
    again.load_values(tuned.values())
    assert torch.equal(logits(again.model), logits(base))
