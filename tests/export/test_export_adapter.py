"""An adapter alone for PEFT, and merged: both are the run's own model in other people's hands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import merged as changed
from test_export_merged import IDS, logits_elsewhere

import skimp.api
from skimp.core.errors import CheckpointError, ModelError
from skimp.export.adapter import export_adapter
from skimp.export.gguf import export_gguf
from skimp.export.merged import export_merged
from skimp.run.found import find
from skimp.run.opened import open_model

BY_PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[1]), sys.argv[2]).eval()
with torch.no_grad():
    torch.save(model(torch.tensor(eval(sys.argv[3]))).logits.float(), sys.argv[4])
"""


@pytest.fixture
def run(recipe: dict[str, Any], plan_once: None) -> str:
    skimp.api.train(changed(recipe, {"adapter": {"name": "lora", "r": 4, "scale": "rslora"}, "train.lr": 3e-2}))
    return str(recipe["output"])


def test_merged_is_what_peft_computes_and_what_gguf_holds(run: str, tiny_folder: Path, tmp_path: Path) -> None:
    with find(run) as found:
        ours = open_model(found).head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))
        export_merged(found, tmp_path / "merged")
        export_gguf(found, tmp_path / "m.gguf")
        facts = export_adapter(found, tmp_path / "peft")
    theirs, _ = logits_elsewhere(tmp_path / "merged", tmp_path / "merged.pt")
    base, _ = logits_elsewhere(tiny_folder, tmp_path / "base.pt")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (theirs - base).abs().max() > 0.1
    with find(str(tmp_path / "m.gguf")) as found:
        again = open_model(found).head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))
    assert torch.equal(again, ours)
    assert facts["tensors"] == 2 * 7 * 2
    with find(str(tmp_path / "peft")) as found:
        again = open_model(found).head.logits_of(IDS, torch.arange(IDS.shape[1]).unsqueeze(0))
    assert torch.equal(again, ours)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["use_rslora"], config["base_model_name_or_path"]) == (4, True, str(tiny_folder))
    pytest.importorskip("peft")
    done = subprocess.run(
        [sys.executable, "-c", BY_PEFT, tiny_folder, tmp_path / "peft", str(IDS.tolist()), tmp_path / "peft.pt"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "peft.pt"), theirs, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_exported_once_and_only_from_a_run_that_has_one(
    run: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with find(run) as found:
        export_adapter(found, tmp_path / "peft")
        with pytest.raises(CheckpointError, match="--force replaces it"):
            export_adapter(found, tmp_path / "peft")
        export_adapter(found, tmp_path / "peft", force=True)
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "PeftModel" in card
    assert "scale: rslora" in card
    with find(str(tiny_folder)) as found, pytest.raises(ModelError, match=r"no adapter[\s\S]*--to merged"):
        export_adapter(found, tmp_path / "other")
