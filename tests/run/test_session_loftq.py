"""Whole sessions of LoftQ: the base is coded with a product beside it, again at every resume and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged
from transformers import AutoModelForCausalLM

import skimp
from skimp.core.codecs import NF4
from skimp.core.errors import SkimpError
from skimp.export.adapter import export_adapter
from skimp.export.merged import export_merged
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.evaluation import choose_way, score
from skimp.run.found import find
from skimp.run.held_out import held_out
from skimp.run.opened import open_model

pytestmark = pytest.mark.usefixtures("plan_once")
IDS = torch.arange(1, 20).unsqueeze(0)


def start(recipe: dict[str, Any], folder: Path, voice: Any = None, resume: bool = False, **more: Any) -> Any:
    own = {"adapter": {"name": "loftq", "r": 4}, "model": {"name": str(folder), "weights": "nf4"}}
    own |= {key: more.pop(key) for key in own if key in more}
    return skimp.train(merged({**recipe, **own}, more), resume=resume, voice=voice)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_it_trains_resumes_to_the_bit_and_leaves_in_both_ways(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    whole = start(recipe, tiny_folder, output=str(tmp_path / "whole"))
    start(recipe, tiny_folder, Heard(stop_at=3))
    outcome = start(recipe, tiny_folder, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        names = list(expected.names("adapter"))
        state = {name: expected.read("adapter", name) for name in names}
        assert all(torch.equal(found.read("adapter", name), state[name]) for name in names)
    assert sum(name.endswith("lora_B0") for name in names) == 14
    # Read again, it scores what training ended with: the codes are those that were fitted.
    with find(str(whole.folder)) as again:
        text = held_out(again, [])
        way = choose_way(again, torch.float32, text.seq_len, None)
        opened = open_model(again)
    (rows,) = text.sets.values()
    scored = score(opened, rows, "", way, 256 // text.seq_len)
    assert scored.loss == pytest.approx(whole.summary["eval_loss_after"], abs=1e-5)
    ours = opened.head.logits_of(IDS, torch.arange(19).unsqueeze(0))
    for onto in ("dequantised", "original"):
        with find(str(whole.folder)) as stored:
            stored.stored.onto(onto)
            export_merged(stored, tmp_path / onto)
    models = {onto: AutoModelForCausalLM.from_pretrained(tmp_path / onto) for onto in ("dequantised", "original")}
    torch.testing.assert_close(logits(models["dequantised"]), ours.view(1, 19, -1), atol=1e-5, rtol=1e-5)
    # As trained the weight holds Q + s B A; on the original, what training moved.
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    for leaf in ("self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.1.{leaf}"
        weight = base.get_submodule(name).weight.detach()
        a, b, a0, b0 = (state[f"{name}.lora_{part}"] for part in ("A", "B", "A0", "B0"))
        moved = models["original"].get_submodule(name).weight.detach()
        torch.testing.assert_close(moved, weight + 2.0 * (b @ a - b0 @ a0), atol=1e-5, rtol=1e-5)
        trained = models["dequantised"].get_submodule(name).weight.detach()
        plain = NF4().decode(NF4().encode(weight), tuple(weight.shape), torch.float32)
        began = trained - 2.0 * (b @ a - b0 @ a0)  # Q + s B0 A0
        assert float((weight - began).norm()) < 0.95 * float((weight - plain).norm())


def test_pefts_form_is_on_the_original_weights(recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    outcome = start(recipe, tiny_folder, **{"train.lr": 1e-2})
    with find(str(outcome.folder)) as found:
        export_adapter(found, tmp_path / "peft")
        found.stored.onto("original")
        export_merged(found, tmp_path / "original")
    moved = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "original"))
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    plain = logits(base)
    theirs = logits(peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval())
    torch.testing.assert_close(theirs, moved, rtol=1e-4, atol=1e-4)
    assert float((theirs - plain).abs().max()) > 0.01
    with find(str(tmp_path / "peft")) as again:
        ours = open_model(again).head.logits_of(IDS, torch.arange(19).unsqueeze(0))
    torch.testing.assert_close(ours.view_as(moved), moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "adapter", "said"),
    [
        ({}, "loftq", r"model\.weights beside loftq[\s\S]*model\.weights=nf4: 4\.13 bits[\s\S]*adapter=lora"),
        ({"weights": "nf4"}, {"name": "loftq", "steps": -1}, r"adapter\.steps"),
        ({"weights": "nf4"}, {"name": "loftq", "init": "olora"}, r"adapter\.init[\s\S]*loftq takes"),
        ({"weights": "nf4"}, {"name": "loftq", "r": 500}, r"adapter\.r"),
        ({"weights": "nf4"}, {"name": "lora", "init": "loftq"}, r"adapter\.init"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_loaded(
    recipe: dict[str, Any], tiny_folder: Path, model: Any, adapter: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skimp.run.session.load_weights", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(SkimpError, match=said):
        start(recipe, tiny_folder, model={"name": str(tiny_folder), **model}, adapter=adapter)
