"""Whole sessions of trained codebooks: planned, resumed to the bit, read again, merged both ways, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import Heard, lines, merged
from transformers import AutoModelForCausalLM

import skimp
from skimp.core.errors import CheckpointError, ConflictError, EffectError, RecipeError
from skimp.export.adapter import export_adapter
from skimp.export.loss_change import loss_change
from skimp.export.merged import export_merged
from skimp.run.checkpoint_folder import latest
from skimp.run.checkpoint_read import load
from skimp.run.found import find
from skimp.run.opened import open_model

pytestmark = pytest.mark.usefixtures("plan_once")


def start(recipe: dict[str, Any], folder: Path, voice: Any = None, resume: bool = False, **changes: Any) -> Any:
    model = {"name": str(folder), "weights": {"name": "sketch", "groups": 2}}
    train = {**recipe["train"], "lr": 1e-2}
    changed = {**recipe, "model": model, "adapter": "sketchtune", "train": train}
    return skimp.train(merged(changed, changes), resume=resume, voice=voice)


def test_trained_codebooks_are_resumed_to_the_bit_and_read_and_merged_as_trained(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    voice = Heard()
    whole = start(recipe, tiny_folder, voice, output=str(tmp_path / "whole"))
    told = "\n".join(voice.said)
    assert "base: 14 linear layers in sketch" in told
    assert "adapter: 14 modules" in told
    start(recipe, tiny_folder, Heard(stop_at=3))
    outcome = start(recipe, tiny_folder, resume=True)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    assert whole.summary["eval_loss_after"] < whole.summary["eval_loss_before"]
    with load(latest(outcome.folder / "checkpoints")) as found, load(latest(whole.folder / "checkpoints")) as expected:
        assert found.groups == ["adapter", "optimizer"]
        for name in expected.names("adapter"):
            assert torch.equal(found.read("adapter", name), expected.read("adapter", name))

    ids, logits = torch.arange(1, 20).unsqueeze(0), {}
    for onto in ("dequantised", "original"):
        with find(str(outcome.folder)) as found:
            found.stored.onto(onto)
            export_merged(found, tmp_path / onto)
            change = loss_change(found, tmp_path / onto, onto)["change"]
        assert abs(change) < 1e-5 if onto == "dequantised" else abs(change) > 1e-5
        with torch.no_grad():
            logits[onto] = AutoModelForCausalLM.from_pretrained(tmp_path / onto)(ids).logits
    with find(str(outcome.folder)) as found:
        seen = open_model(found).head.logits_of(ids, torch.arange(19).unsqueeze(0))
    torch.testing.assert_close(logits["dequantised"], seen.view_as(logits["original"]), atol=1e-5, rtol=1e-5)
    assert (logits["original"] - logits["dequantised"]).abs().max() > 1e-4
    with find(str(outcome.folder)) as found, pytest.raises(ConflictError, match="PEFT"):
        export_adapter(found, tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_codes_learned_from_text_are_in_the_checkpoint_and_planned(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"name": "sketchtune", "calibrate": 3}
    voice = Heard()
    whole = start(recipe, tiny_folder, voice, adapter=asked, output=str(tmp_path / "whole"))
    told = "\n".join(voice.said)
    assert "sketches of 14 layers learned from 3 rows" in told
    heard = Heard()
    plain = start(recipe, tiny_folder, heard, output=str(tmp_path / "plain"))
    phases, without = (one.plans[0].profile.phases for one in (voice, heard))
    assert phases.keys() - without.keys() == {"calibrate"}
    assert phases["calibrate"] > 1_000_000
    assert whole.summary["loss_first"] != plain.summary["loss_first"]
    start(recipe, tiny_folder, Heard(stop_at=3), adapter=asked)
    monkeypatch.setattr("skimp.run.calibrated.calibrate", lambda *a, **k: pytest.fail("learned once more"))
    outcome = start(recipe, tiny_folder, resume=True, adapter=asked)
    assert [s["loss"] for s in lines(outcome.folder / "metrics.jsonl")] == [
        s["loss"] for s in lines(whole.folder / "metrics.jsonl")
    ]
    ids = torch.arange(1, 20).unsqueeze(0)
    with find(str(outcome.folder)) as found:
        export_merged(found, tmp_path / "merged")
        assert abs(loss_change(found, tmp_path / "merged", "dequantised")["change"]) < 1e-5
    with find(str(outcome.folder)) as found:
        seen = open_model(found).head.logits_of(ids, torch.arange(19).unsqueeze(0))
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(written, seen.view_as(written), atol=1e-5, rtol=1e-5)


def test_mutation_codes_that_were_to_be_learned_and_are_not(
    recipe: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skimp.run.calibrated.calibrate", lambda *a, **k: [])
    with pytest.raises(EffectError, match=r"learned from text[\s\S]*14 are plain k-means"):
        start(recipe, tiny_folder, adapter={"name": "sketchtune", "calibrate": 3})


def test_a_resume_whose_codes_are_others_is_refused(
    recipe: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(recipe, tiny_folder, Heard(stop_at=3))
    monkeypatch.setattr("skimp.core.codecs.sketch.ROUNDS", 1)
    with pytest.raises(CheckpointError, match=r"checksum[\s\S]*on other codes"):
        start(recipe, tiny_folder, resume=True)


@pytest.mark.parametrize(
    ("weights", "adapter", "error", "said"),
    [
        (None, "sketchtune", RecipeError, r"model\.weights[\s\S]*sketch, with adapter sketchtune"),
        ("nf4", "sketchtune", ConflictError, r"learned codebook[\s\S]*model\.weights=sketch"),
        (
            "sketch",
            {"name": "sketchtune", "r": 4},
            RecipeError,
            r"sketchtune takes targets, calibrate",
        ),
        ("sketch", {"name": "sketchtune", "calibrate": -1}, RecipeError, r"adapter\.calibrate"),
        ("sketch", {"name": "sketchtune", "targets": ["q_porj"]}, Exception, r"did you mean 'q_proj'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_weight_is_loaded(
    recipe: dict[str, Any], weights: Any, adapter: Any, error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("weights were loaded")

    monkeypatch.setattr("skimp.run.session.load_weights", never)
    model = {"name": recipe["model"], **({} if weights is None else {"weights": weights})}
    with pytest.raises(error, match=said):
        skimp.train({**recipe, "model": model, "adapter": adapter})
    assert not Path(recipe["output"]).exists()
