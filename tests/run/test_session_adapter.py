"""Whole sessions that train an adapter: what is said, saved, resumed, continued and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged
from transformers import AutoModelForCausalLM

import skimp
from skimp.adapters.lora import LoRA
from skimp.adapters.spec import Spec
from skimp.core.errors import CheckpointError, ModelError, RecipeError
from skimp.core.structure import read_structure
from skimp.export.peft import write_peft
from skimp.run.base import fingerprint
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import Checkpoint, load

pytestmark = pytest.mark.usefixtures("plan_once")


def start(recipe: dict[str, Any], voice: Any = None, resume: bool = False, **changes: Any) -> Any:
    adapter = changes.pop("adapter", {"r": 4})
    return skimp.train(merged({**recipe, "adapter": adapter}, changes), resume=resume, voice=voice)


def attached(model: Any, saved: Checkpoint) -> LoRA:
    """What a checkpoint holds, on its base: its own words and tensors are enough."""
    lora = LoRA(model, Spec.from_dict(saved.meta["adapter"]), read_structure(model))
    with torch.no_grad():
        saved.read_all("adapter", lora.named_parameters())
    return lora


def test_a_run_says_what_it_trains_and_saves_nothing_else(recipe: dict[str, Any]) -> None:
    voice = Heard()
    outcome = start(recipe, voice, adapter={"r": 4, "targets": ["q_proj", "down_proj"]})
    told = "\n".join(voice.said)
    assert "adapter: 4 modules, 2,816 trained numbers, 11.3 kB" in told
    assert "q_proj: 2 of 64 x 64, r 4, all blocks, 1,024 numbers" in told
    rows = outcome.summary["adapter_table"]
    assert sum(row["parameters"] for row in rows) == 2816 == outcome.summary["plan"]["trained"]
    with load(latest(outcome.folder / "checkpoints")) as saved:
        assert saved.groups == ["adapter", "optimizer"]
        assert len(saved.names("adapter")) == 8
    assert outcome.summary["loss_last"] < outcome.summary["loss_first"]


def test_a_checkpoint_is_attached_to_its_base_again(recipe: dict[str, Any], tiny_folder: Path) -> None:
    outcome = start(recipe, adapter={"r": 4, "embeddings": True})
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    ids = torch.arange(1, 20).unsqueeze(0)
    with load(latest(outcome.folder / "checkpoints")) as saved, torch.no_grad():
        before = model(ids).logits
        lora = attached(model, saved)
        assert (model(ids).logits - before).abs().max() > 0.01
        for name, parameter in lora.named_parameters():
            assert torch.equal(parameter, saved.read("adapter", name))


def test_resumed_is_bit_equal_and_the_base_comes_from_its_source(recipe: dict[str, Any], tmp_path: Path) -> None:
    adapter = {"r": 4, "dropout": 0.2}
    whole = start(recipe, adapter=adapter, output=str(tmp_path / "whole"))
    start(recipe, Heard(stop_at=3), adapter=adapter)
    outcome = start(recipe, resume=True, adapter=adapter)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    found, expected = (load(latest(o.folder / "checkpoints")) for o in (outcome, whole))
    for name in expected.names("adapter"):
        assert torch.equal(found.read("adapter", name), expected.read("adapter", name))


def test_a_resume_on_another_base_is_refused(recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_folder, base)
    start({**recipe, "model": str(base)}, Heard(stop_at=3))
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight[5] += 1e-3
    model.save_pretrained(base)
    with pytest.raises(CheckpointError, match=r"fingerprint [0-9a-f]{16}[\s\S]*have changed since"):
        start({**recipe, "model": str(base)}, resume=True)


def test_an_adapter_is_continued_from_a_folder(recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    first = start(recipe, output=str(tmp_path / "first"))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    mark = fingerprint(model)
    with load(latest(first.folder / "checkpoints")) as saved:
        assert saved.meta["base"] == mark
        lora = attached(model, saved)
    write_peft(tmp_path / "adapter", lora, base_name=str(tiny_folder), base=mark)
    voice = Heard()
    second = start(recipe, voice, adapter={"from": str(tmp_path / "adapter")})
    assert second.summary["eval_loss_before"] == pytest.approx(first.summary["eval_loss_after"], abs=1e-6)
    assert "r 4, all blocks" in "\n".join(voice.said)
    write_peft(tmp_path / "other", lora, base_name="another", base="0" * 16)
    with pytest.raises(ModelError, match=r"another base[\s\S]*another, which it was made for"):
        start(recipe, adapter={"from": str(tmp_path / "other")}, output=str(tmp_path / "third"))


@pytest.mark.parametrize(
    ("adapter", "error", "said"),
    [
        ({"targets": ["q_proj", "v_porj"]}, Exception, r"'v_porj'[\s\S]*did you mean 'v_proj'"),
        ({"from": "nowhere"}, ModelError, r"adapter\.from nowhere[\s\S]*no such folder"),
        ({"from": "x", "r": 4}, RecipeError, r"either `from` or r"),
        ({"name": "lroa"}, RecipeError, r"did you mean 'lora'"),
        ({"targets": "(q_proj"}, RecipeError, r"as an expression it is wrong"),
        ({"r": 0}, RecipeError, r"adapter\.r"),
    ],
)
def test_bad_adapters_are_refused_before_a_weight_is_loaded(
    recipe: dict[str, Any], adapter: dict[str, Any], error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("skimp.run.session.load_weights", never)
    with pytest.raises(error, match=said):
        start(recipe, adapter=adapter)
    assert not Path(recipe["output"]).exists()


def test_one_word_and_its_keys_from_the_command_line(recipe: dict[str, Any]) -> None:
    from skimp.recipe import load_recipe

    made = load_recipe({**recipe, "adapter": "lora"}, ["adapter.r=8", "adapter.dropout=0.1"])
    assert (made.adapter.r, made.adapter.alpha, made.adapter.targets) == (8, 16.0, "all-linear")
    assert load_recipe(made.as_dict()) == made
    continued = load_recipe({**recipe, "adapter": {"from": "folder"}})
    assert continued.adapter.source == "folder"
    assert continued.adapter.r is None
    assert json.loads(json.dumps(continued.as_dict()))["adapter"]["from"] == "folder"
    assert load_recipe(continued.as_dict()) == continued
