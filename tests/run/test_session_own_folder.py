"""An adapter that no other program knows, in a folder of skimp's own; and S2A's shifts where biases are there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from session_cases import VOCABULARY, merged
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import skimp
from skimp.adapters import attach_folder
from skimp.adapters.folder import FACTS
from skimp.core.errors import CheckpointError, ConflictError, ModelError, SkimpError
from skimp.export.adapter import export_own
from skimp.export.merged import export_merged
from skimp.run.found import find
from skimp.run.opened import open_model

pytestmark = pytest.mark.usefixtures("plan_once")
IDS = torch.arange(1, 20).unsqueeze(0)

ELSEWHERE = """
import sys, torch, skimp.adapters
from skimp.core import attention
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation=attention.register()).eval()
handle = skimp.adapters.attach_folder(sys.argv[2], base)
with torch.no_grad(), attention.declared(None):
    torch.save((handle.name, base(torch.arange(1, 20).unsqueeze(0), use_cache=False).logits), sys.argv[3])
"""


def ours(where: Path) -> torch.Tensor:
    with find(str(where)) as found:
        opened = open_model(found)
    return opened.head.logits_of(IDS, torch.arange(19).unsqueeze(0)).view(1, 19, -1)


@pytest.mark.parametrize(
    ("adapter", "model"),
    [
        ({"name": "s2a", "prompt": 3, "rank": 2}, {}),
        ({"name": "qst", "reduce": 4}, {"weights": "nf4"}),
        ({"name": "loftq", "r": 4}, {"weights": "nf4"}),
        ({"name": "s2ft", "o": 0.5, "d": 0.1, "select": "gradient"}, {}),
        ({"name": "sst", "r": 8, "every": 4, "warmup": 1}, {}),
    ],
    ids=lambda value: value.get("name", ""),
)
def test_the_folder_is_the_run_to_the_bit(
    recipe: dict[str, Any], tmp_path: Path, adapter: dict[str, Any], model: dict[str, Any]
) -> None:
    outcome = skimp.train(merged({**recipe, "adapter": adapter, "model": {"name": recipe["model"], **model}}, {}))
    with find(str(outcome.folder)) as found:
        facts = export_own(found, tmp_path / "own")
        with pytest.raises(CheckpointError, match="--force replaces it"):
            export_own(found, tmp_path / "own")
    assert facts["kind"] == "adapter"
    assert f"A {adapter['name']} adapter" in (tmp_path / "own" / "README.md").read_text()
    shutil.move(tmp_path / "own", tmp_path / "elsewhere")
    assert torch.equal(ours(tmp_path / "elsewhere"), ours(outcome.folder))


def test_another_process_loads_it_on_the_base(recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    outcome = skimp.train({**recipe, "adapter": {"name": "s2a", "prompt": 3, "rank": 2}})
    with find(str(outcome.folder)) as found:
        export_own(found, tmp_path / "own")
        with pytest.raises(ConflictError, match=r"prompts[\s\S]*keys and values before the text[\s\S]*--to adapter"):
            export_merged(found, tmp_path / "merged")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tiny_folder, tmp_path / "own", tmp_path / "out.pt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, logits = torch.load(tmp_path / "out.pt")
    assert name == "s2a"
    torch.testing.assert_close(logits, ours(outcome.folder), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tiny_folder)(IDS).logits
    assert float((logits - plain).abs().max()) > 0.01

    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with pytest.raises(ConflictError, match=r"adapter\.prompt=3"):  # its attention would never see them
        attach_folder(tmp_path / "own", base)
    written = json.loads((tmp_path / "own" / FACTS).read_text())
    (tmp_path / "own" / FACTS).write_text(json.dumps({**written, "version": 2}))
    with pytest.raises(ModelError, match=r"format 2[\s\S]*newer skimp"):
        find(str(tmp_path / "own"))
    (tmp_path / "own" / FACTS).write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        attach_folder(tmp_path / "own", base)
    gone = {**written, "base": {**written["base"], "name": str(tmp_path / "nowhere")}}
    (tmp_path / "own" / FACTS).write_text(json.dumps(gone))
    with pytest.raises(SkimpError, match="nowhere"):
        find(str(tmp_path / "own"))
    with pytest.raises(ModelError, match=f"no {FACTS}"):
        attach_folder(tmp_path, base)


def test_shifts_alone_merge_where_every_layer_has_a_bias(
    recipe: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt2"
    torch.manual_seed(1)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).eval()
    base.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, folder / name)
    asked = {"model": str(folder), "adapter": {"name": "s2a", "prompt": 0}}
    outcome = skimp.train({**recipe, **asked})
    with find(str(outcome.folder)) as found:
        export_merged(found, tmp_path / "merged")
        export_own(found, tmp_path / "own")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        theirs, plain = model(IDS).logits, base(IDS).logits
    torch.testing.assert_close(theirs, ours(outcome.folder), rtol=1e-4, atol=1e-4)
    assert float((theirs - plain).abs().max()) > 0.01
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, base.get_parameter(n))}
    assert moved
    assert all(n.endswith(".bias") and "ln_" not in n for n in moved)
    with torch.no_grad():
        attach_folder(tmp_path / "own", base)
        torch.testing.assert_close(base(IDS).logits, theirs, rtol=1e-4, atol=1e-4)
    # A Llama has no biases to take them.
    outcome = skimp.train({**recipe, "adapter": asked["adapter"], "output": str(tmp_path / "llama")})
    with find(str(outcome.folder)) as found, pytest.raises(ConflictError, match=r"no bias[\s\S]*--to adapter"):
        export_merged(found, tmp_path / "no")
