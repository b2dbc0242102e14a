"""An exported folder is the model: other people's loader, equal logits, tied weights once, whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from skimp.core.errors import CheckpointError, ModelError
from skimp.export.merged import export_merged
from skimp.export.target import MARK
from skimp.run.found import find
from skimp.run.opened import open_model

IDS = torch.tensor([[5, 17, 250, 3, 3, 90, 120]])

LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(torch.tensor(eval(sys.argv[2]))).logits.float(), sys.argv[3])
print(model.dtype, AutoTokenizer.from_pretrained(sys.argv[1]).decode([5, 17]))
"""


def logits_elsewhere(folder: Path, out: Path) -> tuple[torch.Tensor, str]:
    """What transformers computes in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(folder), str(IDS.tolist()), str(out)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out), done.stdout


def our_logits(asked: str) -> torch.Tensor:
    with find(asked) as found:
        opened = open_model(found, "fp32")
    return opened.head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))


def saved_model(make_tiny: Callable[..., Any], tiny_folder: Path, folder: Path, family: str, **changes: Any) -> Path:
    """A model folder of another family with the tiny tokenizer."""
    make_tiny(family, vocab_size=320, **changes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_folder / name, folder / name)
    return folder


def test_transformers_loads_it_in_a_new_process_with_equal_logits(tiny_folder: Path, tmp_path: Path) -> None:
    with find(str(tiny_folder)) as found:
        facts = export_merged(found, tmp_path / "out")
    theirs, said = logits_elsewhere(tmp_path / "out", tmp_path / "logits.pt")
    before, _ = logits_elsewhere(tiny_folder, tmp_path / "before.pt")
    assert torch.equal(theirs, before)
    torch.testing.assert_close(our_logits(str(tmp_path / "out")), theirs, rtol=1e-5, atol=1e-5)
    assert said.startswith("torch.float32")
    assert facts["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {}),
    ],
)
def test_tied_weights_are_written_once_and_the_config_says_so(
    make_tiny: Callable[..., Any], tiny_folder: Path, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source = saved_model(make_tiny, tiny_folder, tmp_path / "in", family, **changes)
    with find(str(source)) as found:
        export_merged(found, tmp_path / "out")
    tied = changes.get("tie_word_embeddings", True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in written) != tied
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == tied
    original = load_file(source / "model.safetensors")
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in original.items()}
    assert all(torch.equal(t, original[n]) for n, t in written.items())


def test_a_dtype_is_a_cast_of_every_tensor(tiny_folder: Path, tmp_path: Path) -> None:
    exact = load_file(tiny_folder / "model.safetensors")
    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        with find(str(tiny_folder)) as found:
            export_merged(found, tmp_path / dtype, dtype=dtype)
        for name, tensor in load_file(tmp_path / dtype / "model.safetensors").items():
            assert torch.equal(tensor, exact[name].to(kind)), name
    _, said = logits_elsewhere(tmp_path / "bf16", tmp_path / "l.pt")
    assert said.startswith("torch.bfloat16")


def test_half_precision_refuses_what_would_become_infinite(tiny_folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_folder, tmp_path / "in")
    from safetensors.torch import save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with find(str(source)) as found:
        with pytest.raises(ModelError, match=r"model\.norm\.weight[\s\S]*65,504[\s\S]*bf16"):
            export_merged(found, tmp_path / "out", dtype="fp16")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
        with pytest.raises(ModelError, match="did you mean 'bf16'"):
            export_merged(found, tmp_path / "out", dtype="bf61")


def test_shards_stay_within_their_size_and_load(tiny_folder: Path, tmp_path: Path) -> None:
    with find(str(tiny_folder)) as found:
        facts = export_merged(found, tmp_path / "out", shard=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(facts["files"])
    sizes = []
    for name in facts["files"]:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert all(index["weight_map"][tensor] == name for tensor in file.keys())  # noqa: SIM118
            sizes.append([file.get_tensor(t).nbytes for t in file.keys()])  # noqa: SIM118
    assert sum(map(sum, sizes)) == index["metadata"]["total_size"]
    assert all(sum(shard) <= 100_000 for shard in sizes)
    theirs, _ = logits_elsewhere(tmp_path / "out", tmp_path / "a.pt")
    before, _ = logits_elsewhere(tiny_folder, tmp_path / "b.pt")
    assert torch.equal(theirs, before)


def test_what_is_in_the_way_is_refused_and_force_replaces_only_our_own(tiny_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with find(str(tiny_folder)) as found:
        export_merged(found, target)
        with pytest.raises(CheckpointError, match=r"earlier export[\s\S]*--force[\s\S]*out-2"):
            export_merged(found, target)
        export_merged(found, target, dtype="bf16", force=True)
        assert json.loads((target / MARK).read_text())["dtype"] == "bfloat16"
        foreign = tmp_path / "mine"
        foreign.mkdir()
        (foreign / "thesis.txt").write_text("years of work")
        for force in (False, True):
            with pytest.raises(CheckpointError, match=r"no export of skimp's: thesis\.txt"):
                export_merged(found, foreign, force=force)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]


def test_a_death_in_the_middle_leaves_the_earlier_export(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    with find(str(tiny_folder)) as found:
        export_merged(found, target)
        before = (target / "model.safetensors").read_bytes()
        monkeypatch.setattr("skimp.export.merged.model_card", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export_merged(found, target, dtype="bf16", force=True)
        monkeypatch.undo()
        assert (target / "model.safetensors").read_bytes() == before
        # What a killed process left (its number is free again) is cleared by the next export.
        dead = target.with_name("out.tmp-999999999")
        dead.mkdir()
        export_merged(found, target, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_said_before_a_byte_is_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("skimp.export.target.shutil.disk_usage", lambda path: usage(10, 9, 1))
    with find(str(tiny_folder)) as found, pytest.raises(CheckpointError, match=r"No space left[\s\S]*free 6"):
        export_merged(found, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    make_tiny: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    source = saved_model(make_tiny, tiny_folder, tmp_path / "in", "llama")
    config = json.loads((source / "config.json").read_text())
    assert config["vocab_size"] == 320
    make_tiny("llama", vocab_size=200).save_pretrained(source)
    with find(str(source)) as found, pytest.raises(ModelError, match=r"200 token embeddings[\s\S]*give the model"):
        export_merged(found, tmp_path / "out")
